"""The promise: speculative greedy text is plain greedy text, token for token, whatever the draft and k.

Nothing may weaken these tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.audit.controls import RandomPolicy, Watch
from outrider.backends.open import open_engines
from outrider.bundle.folder import read_manifest
from outrider.engines.device import Buffer, Launch
from outrider.export.pair import export_pair
from outrider.runtime import drafters
from outrider.runtime.drafters.model import ModelDrafter
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.tests.runtime.toy import Repeat
from outrider.tests.support import PAIR, build, prefill, reseal, write_checkpoint

K = (1, 2, 4, 8)
MODES = (*K, "auto", "n-grams", "toy", "at random")  # the last is every drafter and k at random
CAPACITY = 160
CHUNK = 16
PRECISIONS = ("int4", "int8", "fp16")
DRAFTS = ("trained", "self", "random", *PRECISIONS)  # trained ones, too
PROMPTS = {
    "support": "Customer: Hi, I would like to order a coffee.\nAgent:",
    "story": "Once upon a time there was a little",
    "math": "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:",
    "code": '"""Write a function to add two numbers."""\ndef',
    "multi-byte": "naïve café, 中文 and 🙂",
    "one token": "T",
    "longer than a chunk": "The old man walked along the road, and the dog ran on before him. " * 4,
}


@pytest.fixture(scope="module")
def folders(shipped_exports: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shipped target with three drafts: the trained one, itself, and a random one; and the trained pair in other
    precisions. No token ends the text."""
    folder = tmp_path_factory.mktemp("golden")
    torch.manual_seed(0)
    # Untied: with tied weights even a random model tends to repeat the last token.
    random = LlamaForCausalLM(LlamaConfig.from_pretrained(PAIR / "draft", tie_word_embeddings=False))
    write_checkpoint(folder / "random", random, Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json")))
    exports = {"trained": shipped_exports("fp32")} | {precision: shipped_exports(precision) for precision in PRECISIONS}
    for name, draft in (("self", PAIR / "target"), ("random", folder / "random")):
        exports[name] = folder / f"{name}-onnx"
        export_pair(str(PAIR / "target"), str(draft), exports[name], precision="fp32")
    made = {}
    for name, export in exports.items():
        bundle = build(export, folder / f"{name}-bundle", capacity=CAPACITY, max_prompt_chunk=CHUNK, k=list(K))
        generation = msgspec.structs.replace(read_manifest(bundle).generation, eos_token_ids=[])
        reseal(bundle, generation=generation)
        made[name] = bundle
    return made


@pytest.fixture(scope="module")
def bundles(folders: dict[str, Path]) -> Iterator[dict[str, Outrider]]:
    """The bundles, loaded while a toy drafter is registered beside the others."""
    drafters.register(Repeat)
    yield {name: Outrider.load(folder) for name, folder in folders.items()}
    drafters.unregister(Repeat.name)


def run(outrider: Outrider, prompt: str, k: int | str, limit: int = 2 * CAPACITY) -> list[Event]:
    params = SamplingParams(max_new_tokens=limit)
    if k == "at random":
        usual, outrider.policy = outrider.policy, RandomPolicy(outrider.adaptive_policy())
        events = list(outrider.generate(prompt, params))
        outrider.policy = usual
        return events
    if k == "n-grams":
        return list(outrider.generate(prompt, params, k=K[-1], drafter="ngram"))
    if k == "toy":
        return list(outrider.generate(prompt, params, k=K[-1], drafter="repeat"))
    return list(outrider.generate(prompt, params, k=k))


def tokens(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


@pytest.fixture(scope="module")
def plain(bundles: dict[str, Outrider]) -> dict[str, dict[str, list[Event]]]:
    """Plain decoding's texts by precision."""
    return {
        each: {name: run(bundles[each], prompt, k=0) for name, prompt in PROMPTS.items()} for each in ("trained", *PRECISIONS)
    }


@pytest.mark.parametrize("k", MODES)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculative_text_is_plain_text_up_to_the_last_slot(
    bundles: dict[str, Outrider], plain: dict[str, dict[str, list[Event]]], prompt: str, draft: str, k: int | str
) -> None:
    events, want = run(bundles[draft], PROMPTS[prompt], k), plain[draft if draft in PRECISIONS else "trained"][prompt]
    assert tokens(events) == tokens(want)
    assert "".join(event.text for event in events) == "".join(event.text for event in want)
    assert events[-1].finish_reason == "capacity"
    stats = events[-1].stats
    assert stats.prompt_tokens + stats.emitted == CAPACITY + 1  # the last slot's own token too


@pytest.mark.parametrize("prompt", PROMPTS)
def test_plain_text_is_that_of_transformers(plain: dict[str, dict[str, list[Event]]], prompt: str) -> None:
    model = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(PAIR / "target")(PROMPTS[prompt], return_tensors="pt")
    ours = tokens(plain["trained"][prompt])
    model.generation_config.eos_token_id = None
    theirs = model.generate(inputs.input_ids, do_sample=False, max_new_tokens=len(ours), pad_token_id=0)
    assert theirs[0, inputs.input_ids.shape[1] :].tolist() == ours


@pytest.mark.parametrize("k", K)
def test_a_draft_that_is_the_target_is_always_accepted(bundles: dict[str, Outrider], k: int) -> None:
    for prompt in PROMPTS.values():
        stats = run(bundles["self"], prompt, k, limit=4 * (k + 1))[-1].stats
        assert stats.accepted == stats.drafted == 4 * k
        assert stats.mean_acceptance_length == k + 1


@pytest.mark.parametrize("k", K)
def test_a_random_draft_is_almost_never_accepted(bundles: dict[str, Outrider], k: int) -> None:
    accepted = drafted = 0
    for prompt in PROMPTS.values():
        stats = run(bundles["random"], prompt, k)[-1].stats
        accepted, drafted = accepted + stats.accepted, drafted + stats.drafted
    assert accepted / drafted < 0.03


@pytest.mark.parametrize("k", MODES)
@pytest.mark.parametrize("draft", DRAFTS)
def test_counters_balance(bundles: dict[str, Outrider], draft: str, k: int | str) -> None:
    events = run(bundles[draft], PROMPTS["story"], k)
    stats = events[-1].stats
    assert stats.drafted == stats.accepted + stats.rejected + stats.unexamined
    assert stats.emitted == stats.accepted + stats.own == len(tokens(events))
    assert stats.accepted == sum(flag for event in events for flag in event.from_draft)
    assert stats.rounds == len(events)
    assert sum(stats.accepted_at) == stats.accepted
    assert sum(stats.drafted_at) == stats.drafted


@pytest.mark.parametrize("k", MODES)
@pytest.mark.parametrize("draft", DRAFTS[:-1])  # fp16 rounds more than what is allowed below
def test_the_cache_is_that_of_a_fresh_prefill(
    bundles: dict[str, Outrider], folders: dict[str, Path], draft: str, k: int | str
) -> None:
    """After rejections, what the caches hold up to the confirmed position is what a prefill of the text writes there."""
    outrider = bundles[draft]
    run(outrider, PROMPTS["support"], k, limit=60)
    confirmed = outrider.decoder.slots[0].tokens
    drafter = outrider.decoder.drafters["model"]
    assert isinstance(drafter, ModelDrafter)
    written = drafter.written(0)
    agreed = next((at for at, (a, b) in enumerate(zip(written, confirmed, strict=False)) if a != b), len(written))
    assert not isinstance(k, int) or agreed >= len(confirmed) - k - 1  # in other modes the draft may not have been used lately
    ends = {"target": len(confirmed) - 1, "draft": agreed}
    for role, session in outrider.sessions.items():
        end = ends[role]
        fresh = open_engines(folders[draft], outrider.manifest, outrider.build).session(role, batch=1)
        prefill(fresh, confirmed[:end], CHUNK)
        for name, kept in session.cache().items():
            np.testing.assert_allclose(kept[:, :, :end], fresh.cache()[name][:, :, :end], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("draft", ["self", "random"])
def test_the_draft_runs_two_rows_and_then_single_ones(
    bundles: dict[str, Outrider], draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round, whether all or none of the last one's tokens were accepted: nothing is read twice or left out."""
    outrider, k, prompt = bundles[draft], 4, PROMPTS["longer than a chunk"]
    session = outrider.sessions["draft"]
    runs: list[tuple[int, int]] = []
    bind = session.bind

    def watched(input_ids: Buffer, positions: Buffer, logits: Buffer, window: int, first: int = 0) -> Launch:
        launch = bind(input_ids, positions, logits, window, first)

        def run() -> None:
            runs.append((int(positions.view()[0]), input_ids.shape[1]))
            launch()

        return run

    monkeypatch.setattr(session, "bind", watched)
    monkeypatch.setattr(session, "_passes", {})
    fresh = outrider.observed(Watch())  # its launches are bound anew
    length = len(outrider.text.encode(prompt, chat=False))
    want = [(at, min(CHUNK, length - 2 - at)) for at in range(0, length - 2, CHUNK)]
    for event in islice(fresh.generate(prompt, SamplingParams(max_new_tokens=60), k=k), 6):
        want += [(length - 2, 2), *((length + at, 1) for at in range(k - 1))]
        assert runs == want
        length += len(event.token_ids)
    assert len(runs) > 3 * k
