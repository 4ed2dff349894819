"""The shapes that TensorRT's engines are built for: an optimization profile for every kind of pass in a round.

Within a profile, only the batch, the window of the cache, and the rows of a prompt's chunk vary.
"""

from __future__ import annotations

from outrider.bundle.manifest import READS_FEATURES, READS_MASKS, Manifest, Profile, round_rows
from outrider.engines.contract import (
    COMMITTED,
    FEATURE_POSITIONS,
    INPUT_IDS,
    KEY_POSITIONS,
    PENDING,
    POSITIONS,
    sized,
    window_buckets,
)
from outrider.engines.samplers import CANDIDATES, DRAFT_SAMPLERS, MARKOV, sampler_tensors


def all_profiles(
    manifest: Manifest, k: list[int], capacity: int, batch: int, max_prompt_chunk: int
) -> dict[str, list[Profile]]:
    """Return the profiles of every engine of a bundle."""
    sizes = k, capacity, batch, max_prompt_chunk
    steps = {role: step_profiles(*sizes, role, bool(manifest.models[role].recurrent)) for role in manifest.roles}
    samplers = {name: sampler_profiles(name, k, batch, manifest.vocab_rows, manifest.block_state) for name in manifest.samplers}
    return {**steps, **samplers}


def step_rows_profiled(role: str, k: list[int], capacity: int) -> list[tuple[int, int]]:
    """Return the minimum and maximum rows of each profile for the rounds of a role's model.

    Two rows are a draft's first step. The target also has a profile for two rows, because a prompt's last chunk may have them.
    A model that drafts in one pass has a single profile, because the number of rows in its passes varies too much.
    """
    rows = [each for each in round_rows(role, k) if each <= capacity]
    return [(1, rows[-1])] if role in READS_MASKS else [(each, each) for each in rows]


def step_profiles(
    k: list[int], capacity: int, batch: int, max_prompt_chunk: int, role: str = "target", recurrent: bool = False
) -> list[Profile]:
    """Return the profiles of a role's step model, without its cache: one to read prompts, then those for rounds."""
    windows = window_buckets(capacity)
    rows = [(1, max_prompt_chunk), *step_rows_profiled(role, k, capacity)]
    more = [FEATURE_POSITIONS] if role in READS_FEATURES else [PENDING, COMMITTED] if recurrent else []
    return [
        {
            INPUT_IDS: ([1, low], [batch, high], [batch, high]),
            POSITIONS: ([1], [batch], [batch]),
            # Tuned for the longest window, where a slow kernel costs the most.
            KEY_POSITIONS: ([windows[0]], [windows[-1]], [windows[-1]]),
            **{name: ([1], [batch], [batch]) for name in more},
        }
        for low, high in rows
    ]


def sampler_profiles(sampler: str, k: list[int], batch: int, vocab_rows: int, block_state: int | None = None) -> list[Profile]:
    """Return the profiles of one of `contract.SAMPLERS`: one for plain decoding, then one for each k.

    A drafter has a single profile: its passes have one row, and `drafted` has a column for each row of the longest verifying
    pass. For `candidates`, profiles contain values instead of shapes, from 1 to the limit of TensorRT's `TopK`.
    """
    limit = min(CANDIDATES[-1], vocab_rows)
    typical = 1 if sampler == "logprobs" else min(CANDIDATES[0], vocab_rows)
    profiles: list[Profile] = []
    for rows in [k[-1] + 1] if sampler in (*DRAFT_SAMPLERS, MARKOV) else [1, *(each + 1 for each in k)]:
        profile: Profile = {}
        for tensor in sampler_tensors(sampler, vocab_rows, block_state)[0]:
            sizes = ({"batch": b, "rows": rows, "edits": edits} for b, edits in ((1, 1), (batch, 1), (batch, vocab_rows)))
            low, usual, high = ([*sized(tensor.shape, each)] for each in sizes)
            profile[tensor.name] = (low, usual, high)
        if "candidates" in profile:
            profile["candidates"] = ([1], [typical], [limit])
        profiles.append(profile)
    return profiles
