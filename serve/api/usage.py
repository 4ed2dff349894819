"""Token counts, speculation metrics and finish reasons for responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.runtime.stats import Stats


def usage(stats: Sequence[Stats], prompts: Sequence[int]) -> dict[str, Any]:
    """Return the token counts of a request.

    Args:
        stats: the statistics of each choice, prompt by prompt.
        prompts: the number of tokens of each prompt. A prompt counts once, and so do the cached tokens of its first choice.
    """
    prompt, completion = sum(prompts), sum(each.emitted for each in stats)
    choices_per_prompt = max(len(stats) // max(len(prompts), 1), 1)
    cached = sum(each.cached_tokens for each in stats[::choices_per_prompt])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation_metrics(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """Return the counters of speculative decoding in vLLM's form, which AIPerf reads; None if there are several choices."""
    if len(stats) != 1:
        return None
    (one,) = stats
    return {
        "speculative_decoding": {
            "mean_acceptance_length": one.mean_acceptance_length,
            "draft_acceptance_rate": one.acceptance_rate,
            "acceptance_histogram": one.histogram,
            "num_spec_steps": one.drafting_rounds,
            "num_accepted_draft_tokens": one.accepted,
            "num_draft_tokens": one.drafted,
            "num_spec_tokens": len(one.drafted_at),
        }
    }


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's name for a finish reason. It has no name for a full cache."""
    return "length" if reason == "capacity" else reason
