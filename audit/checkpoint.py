"""`outrider verify --against`: greedy answers compared with those that another implementation makes of the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest

import numpy as np

from outrider.audit.prompts import PROMPTS
from outrider.audit.report import ComparedTexts, Divergence
from outrider.audit.texts import LENGTH, PLAIN, modes
from outrider.engines.precisions import PRECISIONS
from outrider.errors import UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams

NEAR_TIE = 2 * PRECISIONS["fp32"].parity  # of the largest logit: either of two logits may be off by the tolerance of exports
Generate = Callable[[list[int], int], list[int]]  # prompt, largest number of new tokens -> new tokens


def check_precision(outrider: Outrider) -> None:
    """Raise an error unless the target is in fp32: rounded weights rightly answer otherwise than the checkpoint's own.

    Raises:
        UsageError: the target is in another precision.
    """
    precision = outrider.manifest.models["target"].precision
    if precision != "fp32":
        raise UsageError(
            f"--against compares bundles in fp32, and the target is in {precision}", "export the pair with --precision fp32"
        )


def compare_answers(outrider: Outrider, generate: Generate, progress: Progress = SILENT) -> ComparedTexts:
    """Compare greedy answers, plain and in every mode that drafts, with what `generate` answers to the audit's prompts.

    Answers may diverge at a near-tie, where the target's two highest logits are closer than what rounding in fp32 explains.
    """
    texts, params = ComparedTexts(len(PROMPTS)), SamplingParams(max_new_tokens=LENGTH)
    progress.stage("comparing answers", len(PROMPTS) * (1 + len(modes(outrider))))
    for text in PROMPTS:
        prompt = outrider.text.encode(text, chat=False)
        expected = generate(prompt, LENGTH)
        for mode in (PLAIN, *modes(outrider)):
            events = outrider.generate(prompt, params, k=mode.k, drafter=mode.drafter)
            answer = [token for event in events for token in event.token_ids]
            texts.compared += 1
            if answer != expected:
                pairs = zip_longest(expected, answer, fillvalue=-1)  # of an answer that has ended
                place, (theirs, ours) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
                near = {theirs, ours} == _near_tie(outrider, prompt + expected[:place])
                label = f"{mode.drafter}, k = {mode.k}" if mode.k else "plain"
                divergence = Divergence(text, 0.0, label, place, theirs, ours)
                (texts.near_ties if near else texts.differences).append(divergence)
            progress.advance(1)
    return texts


def _near_tie(outrider: Outrider, context: list[int]) -> set[int]:
    """Return the target's two most likely tokens after a context if they are nearly as likely, or else the first."""
    target, chunk, last = outrider.sessions["target"], outrider.build.max_prompt_chunk, len(context) - 1
    for start in range(0, last, chunk):
        target.write(np.array([context[start : min(start + chunk, last)]]), np.array([start]))
    logits = target.run(np.array([context[last:]]), np.array([last]))[0, -1]
    second, first = np.argsort(logits)[-2:].tolist()
    return {first, second} if logits[first] - logits[second] <= NEAR_TIE * np.abs(logits).max() else {first}
