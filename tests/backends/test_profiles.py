"""Optimisation profiles: every pass that a round may make has one, and no shape is out of order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.backends.tensorrt.profiles import sampler_profiles, step_profiles
from outrider.bundle.manifest import Profile
from outrider.engines.contract import window_buckets
from outrider.engines.samplers import DRAFT_SAMPLERS, SAMPLERS, sampler_tensors


def ordered(profiles: list[Profile]) -> bool:
    return all(
        1 <= least <= usual <= most
        for profile in profiles
        for shapes in profile.values()
        for least, usual, most in zip(*shapes, strict=True)
    )


def test_a_step_model_reads_prompts_then_runs_each_number_of_rows() -> None:
    profiles = step_profiles([1, 4], capacity=100, batch=3, max_prompt_chunk=16)
    assert profiles[0] == {
        "input_ids": ([1, 1], [3, 16], [3, 16]),
        "positions": ([1], [3], [3]),
        "key_positions": ([64], [100], [100]),
    }
    assert [profile["input_ids"] for profile in profiles[1:]] == [([1, n], [3, n], [3, n]) for n in (1, 2, 5)]


@settings(deadline=None)
@given(
    k=st.sets(st.integers(1, 30), min_size=1).map(sorted),
    capacity=st.integers(32, 5000),
    batch=st.integers(1, 9),
    chunk=st.integers(1, 32),
    vocabulary=st.integers(8, 200_000),
)
def test_every_pass_of_a_round_has_its_own_profile(
    k: list[int], capacity: int, batch: int, chunk: int, vocabulary: int
) -> None:
    steps = step_profiles(k, capacity, batch, chunk)
    assert ordered(steps)
    fixed = [profile["input_ids"] for profile in steps[1:]]
    assert sorted({1, 2, *(each + 1 for each in k)}) == [least[1] for least, _, _ in fixed]
    assert all(least[1] == usual[1] == most[1] and least[0] == 1 and most[0] == batch for least, usual, most in fixed)
    for window in window_buckets(capacity):
        assert all(profile["key_positions"][0][0] <= window <= profile["key_positions"][2][0] for profile in steps)
    for name in SAMPLERS:
        profiles = sampler_profiles(name, k, batch, vocabulary)
        assert ordered(profiles)
        names = [tensor.name for tensor in sampler_tensors(name, vocabulary)[0]]
        assert all(list(profile) == names for profile in profiles)
        assert all(profile["candidates"][2][0] == min(3840, vocabulary) for profile in profiles if "candidates" in names)
        if name in DRAFT_SAMPLERS:
            (only,) = profiles
            assert only["logits"] == ([1, 1, vocabulary], [batch, 1, vocabulary], [batch, 1, vocabulary])
            if name == "greedy_draft_sampler":
                continue
            assert only["drafted"][0][1] == only["drafted"][2][1] == k[-1] + 1
            assert only["edits"] == ([1, 1, 4], [batch, 1, 4], [batch, vocabulary, 4])
        else:
            rows = [(profile["logits"][0][1], profile["logits"][2][1]) for profile in profiles]
            assert rows == [(n, n) for n in [1, *(each + 1 for each in k)]]
