"""`manifest.json`: describes an export or a bundle, and has the digest of each of its files.

Both kinds of folder share one schema; only a bundle has `build`. Except for measurements, nothing in a manifest depends on when
or where it was written, so the same inputs give the same export.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from outrider.engines.contract import RecurrentLayer, Stage, StageBackend, step_rows
from outrider.engines.samplers import DRAFT_SAMPLERS, MARKOV, SAMPLERS

SCHEMA_VERSION = 5
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
WEIGHTS = ".data"  # suffix of files of weights
ROLES = ("target", "draft", "parallel-draft", "head", "parallel-head", "block-head")
READS_FEATURES = ("head", "parallel-head", "block-head")
# Models that draft k tokens in one pass, and the possible rows of that pass beyond k and its context. There is a mask for each
# token but the first. In a block head, the last confirmed token has its own row, followed by k - 1 or k masks.
READS_MASKS = {"parallel-draft": (-1,), "parallel-head": (-1,), "block-head": (0, 1)}
ENGINES = (*ROLES, *SAMPLERS, MARKOV)
REMAKE = "make the folder again with this outrider: outrider export, then outrider build-engine"

Positive = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Milliseconds = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
Dimensions = Annotated[list[Positive], msgspec.Meta(min_length=1)]
# Input -> minimum, typical and maximum shape; values for `candidates`.
Profile = dict[str, tuple[Dimensions, Dimensions, Dimensions]]


def model_file(role: str) -> str:
    """Return the path of a role's graph in an export or a bundle. Its weights are in the same path with `WEIGHTS` appended.

    A head is in the target's folder, because it may use weights from the target's file.
    """
    return f"target/{role}.onnx" if role in READS_FEATURES else f"{role}/model.onnx"


def step_file(role: str, stage: Stage | None = None) -> str:
    """Return the path of a role's graph in a bundle, or of its stage's. Stages are side by side, to share weights."""
    return model_file(role) if stage is None else "{}/layers-{}-{}.onnx".format(role, *stage.layers)


def round_rows(role: str, k: list[int]) -> list[int]:
    """Return the row counts of a role's model in rounds of the built `k`, ascending."""
    return step_rows(k, READS_MASKS.get(role, ()))


def sampler_file(name: str) -> str:
    """Return the path of the graph of one of `Manifest.samplers` in an export or a bundle."""
    return f"sampler/{name}.onnx"


def graph_files(name: str) -> tuple[str, ...]:
    """Return the paths in an export of the files of one of `ENGINES`: a graph, and its weights if it has any."""
    path = model_file(name) if name in ROLES else sampler_file(name)
    return (path, path + WEIGHTS) if name in ROLES or name == MARKOV else (path,)


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The base of what is read from JSON: immutable, without unknown fields."""


class FileEntry(Struct, frozen=True):
    """One file of the folder."""

    sha256: str
    size: Annotated[int, msgspec.Meta(ge=0)]  # bytes


class Parity(Struct, frozen=True):
    """The difference between the exported graph's logits and the checkpoint's, over `rows` rows in uneven chunks."""

    rows: int
    max_abs_diff: float
    tolerance: float
    argmax_agreement: float  # share of rows, 0..1
    # For quantized models: the perplexity of the graph and of the fp32 checkpoint on the text in export/heldout.py.
    perplexity: float | None = None
    reference_perplexity: float | None = None
    unrounded_perplexity: float | None = None  # of the graph with fp32 activations, for the method as-is


class Quantization(Struct, frozen=True):
    """How a model's weights were quantized: in blocks along the input dimension, each with an fp32 scale."""

    method: str  # rtn (round to nearest), auto-round, or as-is, which keeps what a quantized checkpoint stores
    head_precision: str  # of the output head: int4, int8 or fp32; with as-is, of all matrices that cannot be kept
    block: Positive  # inputs per scale; 64 or 32 in layers whose inputs it does not divide
    weights: int  # number of quantized weights
    kept: dict[str, int]  # matrices in fp32, except embeddings, and the number of weights of each
    rounded: list[str] = []  # the modules that as-is could not keep, so that their weights were rounded


class MergedAdapter(Struct, frozen=True):
    """A LoRA adapter that was merged into a model."""

    source: str
    weight: float  # the factor of what it added


class Model(Struct, frozen=True):
    """The target, or a model that drafts for it: a draft model, a parallel draft, or a draft head."""

    source: str
    architecture: str
    parameters: Positive
    precision: str  # fp32, fp16, bf16, int4 or int8; the last two apply to weights, and everything else is fp32
    vocab_rows: Positive  # width of the logits, including padding; the same for all models
    max_positions: Positive | None  # the longest supported text; None if there is no limit
    layers: list[tuple[Positive, Positive, Positive]]  # (key/value heads, key width, value width) of each layer with attention
    parity: Parity
    recurrent: list[RecurrentLayer] = []  # the sizes of each recurrent layer
    quantization: Quantization | None = None
    adapters: list[MergedAdapter] = []
    head_tokens: Positive | None = None  # size of a draft's reduced vocabulary, if it has one
    features: Positive | None = None  # width of the features, in the target and the draft head; None without a head
    mask_token: Annotated[int, msgspec.Meta(ge=0)] | None = None  # for `READS_MASKS`: stands for unknown tokens
    block_state: Positive | None = None  # width of a block head's output for its Markov and confidence heads, if it has any
    # For a block head: the number of tokens that it was trained to draft, and whether the last confirmed token's row gives the
    # logits of the first of them.
    trained_k: Positive | None = None
    from_anchor: bool = False

    @property
    def merged(self) -> str:
        """Return the merged adapters, for people; empty if there are none."""
        return ", ".join(f"{each.source} (weight {each.weight:g})" for each in self.adapters)


class Generation(Struct, frozen=True):
    """Generation defaults from the target's checkpoint."""

    eos_token_ids: list[int]
    special_tokens: dict[str, str]  # bos_token, eos_token, ..., for the chat template


class Cost(Struct, frozen=True):
    """Milliseconds of a pass over `batch` sequences, in `runs` runs. A step model's pass ends at the end of `window`.

    `runs` is 0 if the pass was not timed, and its cost is fitted to those of others.
    """

    rows: Positive
    window: Annotated[int, msgspec.Meta(ge=0)]  # 0 for samplers
    batch: Positive
    median: Milliseconds
    fastest: Milliseconds
    slowest: Milliseconds
    runs: Annotated[int, msgspec.Meta(ge=0)]


def is_cuda(place: str) -> bool:
    """Return whether a device, such as cuda:1, is a GPU of NVIDIA's."""
    return place.partition(":")[0] == "cuda"


class Build(Struct, frozen=True):
    """How a bundle's engines were built."""

    backend: str
    backend_version: str
    device: str  # that it was built on or for
    k: list[Positive]  # ascending
    capacity: Positive
    batch: Positive
    max_prompt_chunk: Positive
    windows: list[Positive]
    costs: dict[str, list[Cost]] = {}  # by engine; empty if they were not measured
    # By drafter, the share of the target's greedy tokens that it would have drafted, over prompts that ship with outrider.
    acceptance: dict[str, Share] = {}  # empty if it was not measured
    stages: list[Stage] = []  # of the target, in order; empty if it is not cut
    draft_device: str | None = None  # of models that draft, but not of heads; None is that of the last stage
    # The other fields are for single backends: the first for ONNX Runtime and OpenVINO, the others for TensorRT.
    rewrites: dict[str, dict[str, int]] = {}  # role -> rewrite -> how often it was applied; empty for exported graphs
    compute_capabilities: list[str] = []  # such as 8.9, that the engines run on; if empty, the plans decide
    profiles: dict[str, list[Profile]] = {}  # engine -> its optimization profiles, in order, without the cache's tensors
    version_compatible: bool = False  # whether newer releases of the package can run the plans, which then contain host code

    @property
    def timed(self) -> tuple[int, int]:
        """Return how many costs were timed, and how many were fitted to them."""
        runs = [cost.runs for costs in self.costs.values() for cost in costs]
        return len(runs) - runs.count(0), runs.count(0)

    @property
    def places(self) -> list[str]:
        """Return the device of each stage of the target, in order; that of the bundle if it is not cut."""
        return [stage.device or self.device for stage in self.stages] or [self.device]

    @property
    def homes(self) -> list[str]:
        """Return where each stage of the target runs, in order: its device, after its backend if that is not the bundle's."""
        backends = [stage.backend for stage in self.stages] or [None]
        return [f"{each.name} {place}" if each else place for each, place in zip(backends, self.places, strict=True)]

    @property
    def other_backends(self) -> list[str]:
        """Return the backends of stages that do not have the bundle's, each once."""
        return [*dict.fromkeys(stage.backend.name for stage in self.stages if stage.backend)]

    def seen_by(self, name: str) -> Build:
        """Return the build as one of the backends sees it that built it: as its own, with stages of others."""
        if name == self.backend:
            return self
        ours = {stage.layers: stage.backend for stage in self.stages if stage.backend and stage.backend.name == name}
        theirs = StageBackend(self.backend, self.backend_version, self.rewrites.get("target", {}))
        stages = [
            msgspec.structs.replace(stage, backend=None if stage.layers in ours else stage.backend or theirs)
            for stage in self.stages
        ]
        device = [place for stage, place in zip(self.stages, self.places, strict=True) if stage.layers in ours][-1]
        first = next(iter(ours.values()))
        return msgspec.structs.replace(
            self,
            backend=name,
            backend_version=first.version,
            device=device.partition(":")[0],
            stages=stages,
            draft_device=None,
            rewrites={"target": first.rewrites} if first.rewrites else {},
        )

    @property
    def separates_pools(self) -> bool:
        """Return whether sessions of this bundle need pools of threads for themselves, if they usually share one.

        Two backends in one process have two pools in any case, and neither should spin while it waits.
        """
        return self.limits_threads or bool(self.other_backends)

    @property
    def limits_threads(self) -> bool:
        """Return whether a stage of the target has a number of threads."""
        return any(stage.threads for stage in self.stages)

    def threads(self, stage: Stage | None) -> int | None:
        """Return the threads of a stage, or of what runs beside the last one; None is as many as the process may use."""
        at = stage or (self.stages[-1] if self.stages else None)
        return None if at is None else at.threads

    def in_one_place(self, device: str) -> Build:
        """Return the build on a device, without devices and threads of their own for stages and drafts."""
        stages = [msgspec.structs.replace(stage, device=None, threads=None) for stage in self.stages]
        return msgspec.structs.replace(self, device=device, stages=stages, draft_device=None)

    def stages_of(self, role: str) -> list[Stage]:
        """Return the stages of one of `ROLES`; empty if it is not cut."""
        return self.stages if role == "target" else []

    def files(self, role: str) -> dict[str, Stage | None]:
        """Return the graphs of one of `ROLES`, by path, in the order in which they run, each with its stage."""
        stages: list[Stage | None] = [*self.stages_of(role)]
        return {step_file(role, stage): stage for stage in stages or [None]}

    def own_files(self, role: str) -> list[str]:
        """Return the paths of those graphs that the bundle's backend has built."""
        return [path for path, stage in self.files(role).items() if stage is None or stage.backend is None]

    def rows(self, engine: str) -> list[tuple[int, int]]:
        """Return the minimum and maximum rows of a pass, for each profile of one of `ENGINES`."""
        tensor = "input_ids" if engine in ROLES else "logits"
        shapes = [profile.get(tensor, ([0], [0], [0])) for profile in self.profiles.get(engine, [])]
        return [(low[1], high[1]) if len(low) > 1 and len(high) > 1 else (0, 0) for low, _, high in shapes]


class Manifest(Struct, frozen=True):
    """The contents of `manifest.json`."""

    schema_version: int
    contract_version: int
    outrider_version: str
    vocab_tokens: int
    models: dict[str, Model]
    generation: Generation
    files: dict[str, FileEntry]
    build: Build | None = None

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that have a model. A target may have no draft."""
        return tuple(role for role in ROLES if role in self.models)

    @property
    def samplers(self) -> tuple[str, ...]:
        """Return the samplers that the models need."""
        needed = tuple(name for name in SAMPLERS if len(self.models) > 1 or name not in DRAFT_SAMPLERS)
        return needed if self.block_state is None else (*needed, MARKOV)

    @property
    def block_state(self) -> int | None:
        """Return the width of a block head's output for its Markov and confidence heads; None if there are none."""
        return next((model.block_state for model in self.models.values() if model.block_state is not None), None)

    @property
    def engines(self) -> tuple[str, ...]:
        """Return the engines that the models need."""
        return self.roles + self.samplers

    @property
    def vocab_rows(self) -> int:
        """Return the width of the logits."""
        return self.models["target"].vocab_rows

    def encode(self) -> bytes:
        """Return indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
