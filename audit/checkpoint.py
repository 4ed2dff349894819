"""`outrider verify --against`: compares greedy answers with another implementation's, for the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from outrider.audit.prompts import PROMPTS
from outrider.audit.report import ComparedTexts
from outrider.audit.texts import LENGTH, PLAIN, divergence, modes, read_context
from outrider.engines.precisions import PRECISIONS
from outrider.errors import UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams

NEAR_TIE = 2 * PRECISIONS["fp32"].parity  # of the largest logit: either of two logits may be off by the tolerance of exports
Generate = Callable[[list[int], int], list[int]]  # prompt, largest number of new tokens -> new tokens


def check_precision(outrider: Outrider) -> None:
    """Raise an error unless the target is in fp32: quantized weights legitimately give other answers.

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
                found = divergence(text, params.temperature, mode, expected, answer)
                near = {found.plain, found.speculative} == _near_tie(outrider, prompt + expected[: found.place])
                (texts.near_ties if near else texts.differences).append(found)
            progress.advance(1)
    return texts


def _near_tie(outrider: Outrider, context: list[int]) -> set[int]:
    """Return the target's two most likely tokens after a context if they are nearly as likely, or else the first."""
    last = len(context) - 1
    read_context(outrider, context[:last])
    logits = outrider.sessions["target"].run(np.array([context[last:]]), np.array([last]))[0, -1]
    second, first = np.argsort(logits)[-2:].tolist()
    return {first, second} if logits[first] - logits[second] <= NEAR_TIE * np.abs(logits).max() else {first}
