"""A loaded bundle: its engines, text, drafters and decoder."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Self

from outrider.backends.base import Engines
from outrider.backends.open import open_engines, open_last, read_bundle
from outrider.bundle.integrity import checking, unchanged
from outrider.bundle.manifest import Build, Manifest
from outrider.engines.device import Engine
from outrider.engines.session import Session
from outrider.engines.sizes import Sizes
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime import drafters
from outrider.runtime.decoder import Decoder
from outrider.runtime.drafters.base import DeviceDrafter, Resources
from outrider.runtime.grammar.compiler import Grammars, LocalGrammars
from outrider.runtime.memory.memory import Memory
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.adaptive import AdaptivePolicy
from outrider.runtime.policy.choice import AUTO, NONE
from outrider.runtime.policy.policy import FixedPolicy, Policy
from outrider.runtime.policy.round_costs import RoundCosts
from outrider.runtime.request import Request
from outrider.runtime.rounds.launches import Launches
from outrider.runtime.rounds.rounds import Observer, Rounds
from outrider.runtime.rounds.sampling import SamplingState
from outrider.runtime.text.stream import NONE_SHOWN, TextStream
from outrider.runtime.text.text import Text
from outrider.runtime.text.token_bytes import token_bytes

DEFAULT_K = 4  # the best k for most pairs


@dataclass(slots=True)
class Lease:
    """The current user of the caches."""

    holder: object = None


class LoadedBundle:
    """A bundle with loaded engines, and caches for a number of sequences."""

    def __init__(self, engines: Engines, text: Text, slots: int = 1, *, memory: Memory | None = None):
        """Make caches for `slots` sequences.

        Args:
            memory: of earlier requests, to draft from; it takes in the finished ones.
        """
        self.engines = engines
        self.manifest = engines.manifest
        self.build = engines.build
        self.text = text
        self.sessions = engines.sessions(slots)
        self.samplers = {name: engines.sampler(name) for name in self.manifest.samplers}
        self.vocab_rows = self.sessions["target"].vocab_rows
        self.memory = memory
        if memory is not None:
            memory.attach(self.manifest)
        self.drafters = drafters.available(self.manifest, remembering=memory is not None)
        self.grammars: Grammars = LocalGrammars(text.tokenizer, self.vocab_rows, self.manifest.generation.eos_token_ids)
        self.lease = Lease()
        self._assemble(self.adaptive_policy(), None)

    def _assemble(self, policy: Policy, observer: Observer | None) -> None:
        target, device, build = self.sessions["target"], self.engines.device, self.build
        resources = Resources(self.sessions, target.batch, build.max_prompt_chunk, build.k, self.memory, windowed=True)
        loaded = {name: drafters.get(name)(resources) for name in (*drafters.companions(), *self.drafters)}
        on_device = [drafter for drafter in loaded.values() if isinstance(drafter, DeviceDrafter)]
        parts: list[Engine | Session] = [*self.samplers.values(), *self.sessions.values()]
        record = all(part.recordable for part in parts)
        # An observer reads buffers that drafters share with the other half.
        halves = 2 if target.overlaps and target.batch > 1 and observer is None else 1
        launches = [Launches(device, target, self.samplers, on_device, build.k[-1]) for _ in range(halves)]
        rounds = [Rounds(device, each, record=record, observer=observer) for each in launches]
        self.rounds = rounds[0]
        piece = RoundCosts(self.manifest, build).piece
        others = rounds if halves > 1 else ()
        self.decoder = Decoder(target, self.rounds, loaded, build.k, build.max_prompt_chunk, piece, halves=others)
        self.policy = policy

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        progress: Progress = SILENT,
        *,
        device: str | None = None,
        slots: int | None = 1,
        chat_template: str | None = None,
        memory: Memory | None = None,
        checked: Path | None = None,
        stage_cores: int | None = None,
        stage_timeout: float | None = None,
    ) -> Self:
        """Check every file of a bundle and load its engines.

        Args:
            device: one of the backend's `devices`; None is the device that the bundle was built on.
            slots: sequences to make caches for, at most the batch that the bundle was built for; None is the maximum.
            chat_template: the Jinja template to use instead of the bundle's.
            memory: of earlier requests, to draft from; it takes in the finished ones. None remembers nothing.
            checked: a file that keeps how the bundle was when its digests were right; those of its weights are not computed
                again while it is the same. Whoever can write this file can pass off other weights.
            stage_cores: run the target's stages but the last in other processes, each with this many cores and perhaps a GPU,
                in the Ray cluster at `RAY_ADDRESS` or in a new one on this machine. None runs all of them in this process.
            stage_timeout: the most seconds of a pass through these, if less than two minutes.

        Raises:
            FolderError: the bundle is missing, damaged, has a newer schema, or was replaced while it was loaded.
            EngineError: the backend is not installed, does not run here, or rejects an engine.
            UsageError: the backend does not support the device, the bundle was built for fewer slots or without stages,
                `stage_cores` is no positive whole number, or the memory is of a model with another tokenizer.
        """
        with unchanged(Path(bundle)) as folder:
            manifest, build = read_bundle(folder)
            slots = build.batch if slots is None else slots
            if not 1 <= slots <= build.batch:
                raise UsageError(
                    f"this bundle was built for a batch of {build.batch}, not {slots}", f"build it with --batch {slots}"
                )
            if stage_cores is not None and (not isinstance(stage_cores, int) or stage_cores < 1):
                raise UsageError(f"stage_cores is {stage_cores!r}", "use a whole number from 1 on")
            with checking(folder, manifest, progress, checked):
                text = Text.load(folder, manifest, chat_template)
                if stage_cores is None:
                    engines = open_engines(folder, manifest, build, device)
                else:
                    engines = _open_last(folder, manifest, build, device)
                    engines.elsewhere = _ray_stages(stage_cores, device, stage_timeout)
                loaded = cls(engines, text, slots, memory=memory)
            loaded.engines.prepare(loaded.sessions, progress)
            return loaded

    def observed(self, observer: Observer, policy: Policy | None = None) -> Self:
        """Return a view of this bundle with an observer, and perhaps another policy. Use only one of the two at a time."""
        self.lease.holder = None  # end the current generation: its caches will be overwritten
        self.decoder.abandon()
        other = copy.copy(self)
        other._assemble(policy or self.policy, observer)
        return other

    def adaptive_policy(self) -> AdaptivePolicy:
        """Return a new adaptive policy."""
        stopping, ragged = self.engines.device.synchronous, self.sessions["target"].ragged
        return AdaptivePolicy(lambda batch: RoundCosts(self.manifest, self.build, batch), self.drafters, stopping, ragged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the device's memory. The bundle cannot be used afterwards."""
        self.lease.holder = None
        self.decoder.abandon()
        del self.decoder, self.rounds, self.sessions, self.samplers, self.engines
        gc.collect()  # launches and buffers refer to each other

    @property
    def default_k(self) -> int:
        """The fixed k to use by default: the largest built one up to 4, or else the smallest."""
        return max((k for k in self.build.k if k <= DEFAULT_K), default=min(self.build.k))

    def request(
        self, prompt: list[int], params: SamplingParams, owner: Hashable = None, shown: Mapping[int, str] = NONE_SHOWN
    ) -> Request:
        """Return a new request. `owner` is anything that identifies its owner; for `shown` see `TextStream`.

        Raises:
            UsageError: the request cannot be answered; see `generate`.
        """
        params.check_tokens(self.vocab_rows)
        special = token_bytes(self.text.tokenizer).special if params.stop_strings else {}
        stopping = [token for token, text in special.items() if text in params.stop_strings and token < self.vocab_rows]
        end_ids = [*self.manifest.generation.eos_token_ids, *params.stop_tokens, *stopping]
        self._check(prompt, params, end_ids)
        prompt = [int(token) for token in prompt]  # NumPy's overflow
        structured = params.structured_outputs
        grammar = None if structured is None else self.grammars.begin(structured, owner)
        sampling = SamplingState(params, prompt, end_ids, self.vocab_rows, grammar)
        stream = TextStream(self.text.tokenizer, prompt, params.stop_strings, shown)
        return Request(prompt, params, sampling, stream, self.build.capacity)

    def allowed_drafters(self, k: int | str, drafter: str | None) -> list[str]:
        """Return the drafters that these arguments of `generate` allow, in order of preference."""
        if k == 0:
            return []
        if drafter is None:
            chosen = self.drafters if k == AUTO else self.drafters[:1]
        else:
            chosen = self.drafters if drafter == AUTO else [drafter]
        return [*chosen, *drafters.companions()]

    def policy_for(self, k: int | str, drafter: str | None) -> Policy:
        """Return the policy for these arguments of `generate`."""
        if not isinstance(k, int):
            return self.policy
        return FixedPolicy(self.allowed_drafters(k, drafter)[0] if k else NONE, k)

    def check_drafting(self, k: int | str, drafter: str | None) -> None:
        """Raise `UsageError` if the bundle has no such k or drafter."""
        if k != AUTO and (type(k) is not int or (k != 0 and k not in self.build.k)):
            built = ", ".join(str(size) for size in [0, *self.build.k])
            raise UsageError(
                f"k = {k} was not built into this bundle; it has k = {built}",
                f"choose one of these or {AUTO}, or rebuild the bundle with this k",
                param="k",
            )
        if drafter not in (None, AUTO) and drafters.get(str(drafter)).name not in self.drafters:
            kind = drafters.get(str(drafter))
            other = "give it a memory (--memory FILE)" if kind.remembers else "export the target with one"
            raise UsageError(f"this bundle has no {kind.label}", f"leave the drafter out, or {other}", param="drafter")
        if drafter == AUTO and k != AUTO:
            raise UsageError(
                f"the drafter is {AUTO} but k is {k}",
                f"leave k out, or choose a drafter: {', '.join(self.drafters)}",
                param="drafter",
            )

    def _check(self, tokens: list[int], params: SamplingParams, end_ids: list[int]) -> None:
        capacity = self.build.capacity
        if not tokens:
            raise UsageError("the prompt is empty", "pass at least one token", param="prompt")
        if not all(isinstance(token, Integral) and 0 <= token < self.vocab_rows for token in tokens):
            raise UsageError(
                f"the prompt has a token id outside 0..{self.vocab_rows - 1}", "use the bundle's own tokenizer", param="prompt"
            )
        if len(tokens) > capacity:
            raise UsageError(
                f"the prompt has {len(tokens):,} tokens; the bundle's capacity is {capacity:,}",
                "shorten it, or build the bundle with a larger capacity",
                param="prompt",
            )
        room = capacity - len(tokens) + 1
        if params.min_new_tokens > room:
            raise UsageError(
                f"min_new_tokens is {params.min_new_tokens}, but after this prompt the bundle has room for {room}",
                "ask for fewer, or rebuild the bundle with a larger capacity",
                param="min_new_tokens",
            )
        if params.min_new_tokens and len(set(end_ids)) == self.vocab_rows:
            raise UsageError(
                "every token is a stop token, and min_new_tokens bans them all",
                "remove some stop tokens",
                param="stop_token_ids",
            )

    def engine_seconds(self) -> float:
        """Return the time that engines have run so far."""
        rounds = sum(each.seconds for each in self.decoder.halves or [self.rounds])
        return rounds + sum(session.seconds for session in self.sessions.values())


def _open_last(folder: Path, manifest: Manifest, build: Build, device: str | None) -> Engines:
    """Return a bundle's engines on the device of its target's last stage."""
    if not build.stages:
        raise UsageError("this bundle's target is in one piece", "build it with --stages 2, or leave --stage-cores out")
    return open_last(folder, manifest, build, device)


def _ray_stages(cores: int, device: str | None, timeout: float | None) -> Callable[[Engines, Sequence[Sizes]], Session]:
    try:
        from outrider.backends.remote_stages import LEAST_PASSING, PASSING, RayStages
    except ImportError as error:
        raise EngineError(f"Ray cannot be imported: {error}", "pip install 'outrider[ray]'") from error
    return RayStages(cores, device, min(max(timeout or PASSING, LEAST_PASSING), PASSING))
