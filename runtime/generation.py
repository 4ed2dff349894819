"""`Outrider.load(bundle).generate(prompt)`: an answer as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.errors import OutriderError, UsageError
from outrider.runtime.grammar.structured import StructuredOutputs
from outrider.runtime.loaded import LoadedBundle
from outrider.runtime.memory.memory import Memory
from outrider.runtime.params import DEFAULTS, SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.request import Event, Request
from outrider.runtime.scheduler import Scheduler

__all__ = ["Event", "Memory", "Outrider", "SamplingParams", "StructuredOutputs"]


class Outrider(LoadedBundle):
    """A loaded bundle for one generation at a time: a new one ends the last. For several, see `Scheduler`."""

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams = DEFAULTS,
        *,
        k: int | str = AUTO,
        drafter: str | None = None,
        chat: bool = False,
        allow_special_tokens: bool = False,
    ) -> Iterator[Event]:
        """Generate the continuation of a prompt (text or token ids), and yield one event per round.

        Args:
            params: how tokens are chosen and when the text ends; by default greedily, after 256 tokens.
            k: draft tokens per round: a built number, or 0 for plain decoding. "auto" chooses for every round by cost and
                acceptance.
            drafter: a drafter's name, such as "model" or "ngram", or "auto" for the fastest one in each round. None is "auto"
                if k is, and otherwise the bundle's first drafter.
            chat: put the prompt into the bundle's chat template.
            allow_special_tokens: with `chat`, let text of the prompt become special tokens, such as those that begin a turn.

        Raises:
            UsageError: an argument is wrong; raised before the first event.
            EngineError: from the iterator, if the logits contain NaN or infinity.
            GrammarError: from the iterator, if the masks of a grammar exceed a limit.
        """
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params is {params!r}", "pass SamplingParams(...)")
        if isinstance(prompt, str):
            limit = self.build.capacity
            tokens = self.text.encode(prompt, chat=chat, limit=limit, allow_special_tokens=allow_special_tokens)
        else:
            tokens = list(prompt)
        self.check_drafting(k, drafter)
        if params.varies_with_drafts:
            # With the rejection rule a seed's answer depends on the drafts, which may not depend on timing or earlier requests.
            params = replace(params, memory=False)
            if k == AUTO:
                k, drafter = self.default_k, self.allowed_drafters(k, drafter)[0]
        return self._events(self.request(tokens, params), k, drafter)

    def _events(self, request: Request, k: int | str, drafter: str | None) -> Iterator[Event]:
        paused = 0.0  # the time between events does not count
        scheduler = Scheduler(self, k=k, drafter=drafter, clock=lambda: time.perf_counter() - paused)
        self.lease.holder = scheduler
        scheduler.enqueue([request])
        while request.finish_reason is None:
            if self.lease.holder is not scheduler:
                raise UsageError("another generation was started on this bundle", "finish one before starting the next")
            for _, result in scheduler.step():
                if isinstance(result, OutriderError):
                    raise result
                began = time.perf_counter()
                yield result
                paused += time.perf_counter() - began
