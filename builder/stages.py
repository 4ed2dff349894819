"""Where a target is cut into stages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from outrider.backends import registry
from outrider.backends.base import Backend
from outrider.backends.build_spec import BuildSpec
from outrider.bundle.integrity import check_file, unchanged
from outrider.bundle.manifest import model_file
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT
from outrider.runtime.policy.choice import AUTO

if TYPE_CHECKING:
    import onnx_ir as ir

THREADS = re.compile(r"cpu:threads=([1-9][0-9]{0,3})")
SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
EXAMPLE = "use --stages 2, or --stages 0-13,14-27 to name the layers of each stage"


class Cut(NamedTuple):
    """A target that is cut into stages, once for a whole build."""

    ends: list[int]  # of the stages, each as the number of layers up to there
    parts: list[ir.Model]  # the graph of each


class StagePlace(NamedTuple):
    """Where a stage runs."""

    device: str
    threads: int | None = None  # None is as many as its process may use


def stage_place(wanted: str) -> StagePlace:
    """Return what one word of --stage-device asks for; whether a backend has the device is checked later."""
    found = THREADS.fullmatch(wanted)
    return StagePlace(wanted) if found is None else StagePlace("cpu", int(found[1]))


class StageOptions(NamedTuple):
    """The options that `build-engine` has for stages."""

    stages: str | None  # their number or layers; None if the target is not cut
    places: Sequence[StagePlace]  # of each stage; empty if all are on one device
    backends: Sequence[str]  # of each stage; empty if all have one

    def of_last_stage(self, backend: str, device: str | None) -> tuple[str, str | None]:
        """Return the backend and the device of the last stage: those of the whole target, unless stages have their own.

        Raises:
            UsageError: both are given, or a stage has no backend of its own.
        """
        if self.places and device is not None:
            raise UsageError("--device and --stage-device both say where the target runs", "leave --device out")
        if self.backends and backend != AUTO:
            raise UsageError("--backend and --stage-backend both say what runs the target", "leave --backend out")
        if AUTO in self.backends:
            raise UsageError(f"--stage-backend {','.join(self.backends)}: {AUTO} is no backend", f"name one of {cutting()}")
        last_device = self.places[-1].device.partition(":")[0] if self.places else device
        return self.backends[-1] if self.backends else backend, last_device


def in_stages(spec: BuildSpec, wanted: StageOptions, backends: Sequence[Sequence[Backend]]) -> BuildSpec:
    """Return what to build with the target cut as wanted.

    Args:
        backends: groups of backends; of each, one has to run stages.

    Raises:
        UsageError: no backend of a group runs stages, or the options do not fit the target or each other.
        FolderError: the export's graph is damaged.
        EngineError: the package that cuts graphs is not installed.
    """
    devices = [each.device for each in wanted.places]
    if wanted.stages is not None:
        for group in backends:
            check_cuts(group)
        graph = model_file("target")
        with unchanged(spec.source) as intact:
            check_file(intact, graph, spec.manifest.files[graph], SILENT)  # before anything in it is believed
            cut = cut_target(wanted.stages, intact, {spec.device, *devices} <= {None, "cpu"})
        spec = replace(spec, ends=cut.ends, parts=cut.parts)
    check_number(devices, spec.ends, "device", "cuda:0,cuda:1")
    check_number(wanted.backends, spec.ends, "backend", "onnxruntime,openvino")
    if len({*wanted.backends}) > 1:
        spec = replace(spec, stage_backends=wanted.backends)
    if devices:
        threads = [each.threads for each in wanted.places]
        spec = replace(spec, stage_devices=[] if {*devices} == {"cpu"} else devices, stage_threads=threads)
    return spec


def cut_target(wanted: str, export: Path, on_cpu: bool) -> Cut:
    """Cut an export's target.

    Args:
        wanted: the number of stages, which get about as much memory each, or the layers of each one, such as 0-13,14-27.
        on_cpu: whether all stages run on a CPU, where a table is mapped from its file and takes hardly any memory.

    Raises:
        UsageError: it is neither, or does not fit the target.
        EngineError: the package that cuts graphs is not installed.
    """
    found = [SPAN.fullmatch(part.strip()) for part in wanted.split(",")]
    if not all(found):
        raise UsageError(f"{wanted!r} is neither a number of stages nor a list of layers", EXAMPLE)
    spans = [(int(each[1]), int(each[2] or each[1])) for each in found if each is not None]
    try:
        from outrider.backends.rewriting.graphs import load
        from outrider.backends.rewriting.parts import weights_of, weights_read
        from outrider.backends.rewriting.stages import cut, layers, possible_ends
    except ImportError as error:
        raise EngineError(f"cannot cut the target: {error}", "pip install 'outrider[build]'") from error
    model = load(export / model_file("target"))
    if "," in wanted or "-" in wanted:
        count = layers(model)
        begins = [0, *(last + 1 for _, last in spans)]
        in_order = all(begin == first <= last for begin, (first, last) in zip(begins, spans, strict=False))
        if len(spans) < 2 or not in_order or begins[-1] != count:
            raise UsageError(f"{wanted} are not the layers 0 to {count - 1} in two stages or more, each layer once", EXAMPLE)
        ends = [last + 1 for _, last in spans]
        return Cut(ends, cut(model, ends))
    ends = possible_ends(model)
    if not 2 <= (stages := spans[0][0]) <= len(ends):
        more = f", or a number up to {len(ends)}" if len(ends) > 2 else ""
        hint = f"use --stages 2{more}" if len(ends) > 1 else "leave --stages out"
        raise UsageError(f"a target of {ends[-1]} layers cannot have {stages} stage{'s' * (stages != 1)}", hint)
    sizes = [*map(weights_read if on_cpu else weights_of, cut(model, ends))]
    ends = [ends[index - 1] for index in balanced(sizes, stages)]
    return Cut(ends, cut(model, ends))


def check_cuts(backends: Sequence[Backend]) -> None:
    """Check that one of these backends runs targets in stages.

    Raises:
        UsageError: none does.
    """
    if not any(backend.cuts for backend in backends):
        raise UsageError(f"the backend {backends[-1].name} runs no stages", f"leave --stages out, or use --backend {cutting()}")


def cutting() -> str:
    """Return the names of the backends that run stages, in words."""
    return " or ".join(name for name in registry.names() if registry.get(name).cuts)


def check_number(given: Sequence[object], ends: Sequence[int], what: str, example: str) -> None:
    """Check that there is one of `what` for each stage, if there are any.

    Raises:
        UsageError: there is not.
    """
    if given and len(given) != len(ends):
        raise UsageError(
            f"--stage-{what} names {len(given)} {what}{'s' * (len(given) != 1)}, and the target has {len(ends) or 'no'} stages",
            f"name one for each: --stages 2 --stage-{what} {example}",
        )


def balanced(sizes: Sequence[int], stages: int) -> list[int]:
    """Return the ends of the stages that keep the largest stage as small as possible.

    Args:
        sizes: of the parts between places where the target may be cut, in bytes. The output head is in the last.

    Returns:
        The ends as numbers of parts.
    """
    before = [0, *accumulate(sizes)]

    @cache
    def best(end: int, stages: int) -> tuple[int, tuple[int, ...]]:
        if stages == 1:
            return before[end], (end,)
        earlier = [(begin, *best(begin, stages - 1)) for begin in range(stages - 1, end)]
        return min((max(largest, before[end] - before[begin]), (*ends, end)) for begin, largest, ends in earlier)

    return [*best(len(sizes), stages)[1]]
