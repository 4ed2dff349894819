"""Which shapes TensorRT's engines are built for: one optimisation profile for every kind of pass that a round makes.

The shapes are fixed by construction in all but the batch, the window of the cache, and the rows of a prompt's chunk.
"""

from __future__ import annotations

from outrider.bundle.manifest import Profile
from outrider.engines.contract import CANDIDATES, DRAFTERS, INPUT_IDS, KEY_POSITIONS, POSITIONS, sampler_tensors, window_buckets


def step_profiles(k: list[int], capacity: int, batch: int, max_prompt_chunk: int) -> list[Profile]:
    """The profiles of a step model, without its cache: one to read prompts, then one for each number of rows.

    Two rows are the draft's first step; both models get them, as a chunk of a prompt may end so.
    """
    windows = window_buckets(capacity)
    rows = [(1, max_prompt_chunk), *((n, n) for n in sorted({1, 2, *(each + 1 for each in k)}))]
    return [
        {
            INPUT_IDS: ([1, least], [batch, most], [batch, most]),
            POSITIONS: ([1], [batch], [batch]),
            # Tuned for the longest window: there a slow kernel costs the most.
            KEY_POSITIONS: ([windows[0]], [windows[-1]], [windows[-1]]),
        }
        for least, most in rows
    ]


def sampler_profiles(sampler: str, k: list[int], batch: int, vocab_rows: int, draft_rows: int) -> list[Profile]:
    """The profiles of one of `contract.SAMPLERS`: plain decoding's, then one for each k.

    A drafter has one: a pass of it is one row, and its `drafted` has as many columns as the longest verifying pass rows.
    Of `candidates` the values are given, from 1 to what TensorRT's `TopK` takes.
    """
    most = min(CANDIDATES[-1], vocab_rows)
    likely = 1 if sampler == "logprobs" else min(CANDIDATES[0], vocab_rows)
    profiles: list[Profile] = []
    for rows in [k[-1] + 1] if sampler in DRAFTERS else [1, *(each + 1 for each in k)]:
        profile: Profile = {}
        for tensor in sampler_tensors(sampler, vocab_rows, draft_rows)[0]:
            sizes = ({"batch": b, "rows": rows, "edits": edits} for b, edits in ((1, 1), (batch, 1), (batch, vocab_rows)))
            least, usual, greatest = (
                [size if isinstance(size, int) else known[size] for size in tensor.shape] for known in sizes
            )
            profile[tensor.name] = (least, usual, greatest)
        if "candidates" in profile:
            profile["candidates"] = ([1], [likely], [most])
        profiles.append(profile)
    return profiles
