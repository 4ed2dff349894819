"""Compares whole texts of speculative decoding and of batched requests with those of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest
from typing import NamedTuple

import numpy as np

from outrider.audit.controls import Watch
from outrider.audit.report import ComparedTexts, Counters, Divergence
from outrider.errors import OutriderError
from outrider.progress import Progress
from outrider.runtime import drafters
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.rounds.reference import TOLERANCE, edits_of, named_settings, verify
from outrider.runtime.rounds.sampling import ACCEPTING, DRAWING
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.stats import Stats

LENGTH = 64  # tokens of each prompt's continuation


class DraftingMode(NamedTuple):
    """The arguments of `Outrider.generate` that choose k and the drafter."""

    k: int | str
    drafter: str | None

    @property
    def label(self) -> str:
        return f"{self.drafter}, k = {self.k}" if self.k else "plain"


PLAIN = DraftingMode(0, None)


class BatchedAnswer(NamedTuple):
    """The answer to one of several batched requests."""

    tokens: list[int]
    accepted: int  # how many of the tokens were drafted
    stats: Stats


def modes(outrider: Outrider) -> list[DraftingMode]:
    """Return every k of the drafters on the device, the largest k of the other drafters, and a random choice of all."""
    k, on_device = outrider.build.k, drafters.on_device(outrider.drafters)
    fixed = [DraftingMode(each, name) for name in outrider.drafters for each in (k if name in on_device else k[-1:])]
    return [*fixed, DraftingMode(AUTO, AUTO)]


def compare_greedy(
    outrider: Outrider, watch: Watch, cases: Sequence[tuple[SamplingParams, str]], counters: Counters, progress: Progress
) -> ComparedTexts:
    """Compare speculative greedy texts, one request at a time, on an observed bundle."""
    texts = ComparedTexts(len(cases))
    progress.stage("comparing greedy texts", len(cases) * (1 + len(modes(outrider))))
    for params, text in cases:
        prompt = outrider.text.encode(text, chat=False)
        plain = _generate(outrider, watch, prompt, params, PLAIN, counters)
        progress.advance(1)
        for mode in modes(outrider):
            answer = _generate(outrider, watch, prompt, params, mode, counters)
            compare_text(outrider, texts, text, params, mode, plain, answer, sequences=1)
            progress.advance(1)
    return texts


def compare_batched(
    outrider: Outrider,
    watch: Watch,
    greedy: Sequence[tuple[SamplingParams, str]],
    sampled: Sequence[tuple[SamplingParams, str]],
    counters: Counters,
    progress: Progress,
) -> ComparedTexts:
    """Compare the texts of requests that run batched over all slots with plain decoding of each request alone.

    A request starts when a slot is free. Some are greedy, and some are sampled with a seed. Others use the rejection rule;
    their texts depend on k, so only the watch checks them.
    """
    drawn = [(replace(params, seed=seed, logprobs=2), text) for seed, (params, text) in enumerate(sampled)]
    cases = [*greedy, *((replace(params, rule=rule), text) for params, text in drawn for rule in ("exact-match", "rejection"))]
    alone: list[list[int] | None] = []
    progress.stage("comparing batched texts", len(cases) * (2 + len(modes(outrider))))
    for params, text in cases:
        plain = None
        if params.exact or params.temperature == 0:
            events = outrider.generate(outrider.text.encode(text, chat=False), params, k=0)
            plain = [token for event in events for token in event.token_ids]
        alone.append(plain)
        progress.advance(1)
    texts = ComparedTexts(sum(plain is not None for plain in alone))
    slots = len(outrider.decoder.slots)
    repeats = 1 + slots // len(cases)  # so that there are more requests than slots
    for mode in (PLAIN, *modes(outrider)):
        scheduler = Scheduler(outrider, max_waiting=repeats * len(cases), k=mode.k, drafter=mode.drafter)
        watch.decided.clear()
        prompts = [(outrider.text.encode(text, chat=False), params) for params, text in cases * repeats]
        total = Stats()
        for (tokens, accepted, stats), (params, text), plain in zip(
            answers(scheduler, prompts), cases * repeats, alone * repeats, strict=True
        ):
            if plain is not None:
                compare_text(outrider, texts, text, params, mode, plain, tokens, sequences=slots)
            _count(counters, stats, (stats.emitted, stats.accepted) == (len(tokens), accepted) and stats.unexamined >= 0)
            total.add(stats)
        drafted = sum(checked for checked, _ in watch.decided)
        counters.unbalanced += (total.rounds, total.drafted) != (len(watch.decided), drafted)
        progress.advance(len(cases))
    return texts


def answers(scheduler: Scheduler, prompts: Sequence[tuple[list[int], SamplingParams]]) -> list[BatchedAnswer]:
    """Run a request for each prompt, all batched together, and return their answers.

    Every run batches the same requests, so the rejection rule may be combined with a seed.
    """
    requests = scheduler.enqueue([scheduler.bundle.request(*prompt) for prompt in prompts])
    tokens: dict[int, list[int]] = {id(request): [] for request in requests}
    accepted = dict.fromkeys(tokens, 0)
    while scheduler.busy:
        for request, event in scheduler.step():
            if isinstance(event, OutriderError):
                raise event
            tokens[id(request)] += event.token_ids
            accepted[id(request)] += sum(event.from_draft)
    return [BatchedAnswer(tokens[id(request)], accepted[id(request)], request.stats) for request in requests]


def compare_text(
    outrider: Outrider,
    texts: ComparedTexts,
    text: str,
    params: SamplingParams,
    mode: DraftingMode,
    plain: list[int],
    answer: list[int],
    sequences: int,
) -> None:
    """Compare the answers to a request. `answer` comes from passes of at most `sequences` sequences."""
    texts.compared += 1
    if answer == plain:
        return
    found = divergence(text, params.temperature, mode, plain, answer)
    prompt = outrider.text.encode(text, chat=False)
    sizes = [size for size in outrider.build.k if not isinstance(mode.k, int) or size <= mode.k]
    choices = near_choices(outrider, prompt, params, plain[: found.place], sizes, sequences)
    (texts.near_ties if {found.plain, found.speculative} <= choices else texts.differences).append(found)


def divergence(text: str, temperature: float, mode: DraftingMode, plain: list[int], answer: list[int]) -> Divergence:
    """Return the first place where two answers differ; the token after the end of one is -1."""
    pairs = zip_longest(plain, answer, fillvalue=-1)
    place, tokens = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return Divergence(text, temperature, mode.label, place, *tokens)


def read_context(outrider: Outrider, tokens: list[int], slot: int = 0) -> None:
    """Write tokens into a slot of the target's cache, from its first position on."""
    chunk = outrider.build.max_prompt_chunk
    for at in range(0, len(tokens), chunk):
        outrider.sessions["target"].write(np.array([tokens[at : at + chunk]]), np.array([at]), slot)


def near_choices(
    outrider: Outrider, prompt: list[int], params: SamplingParams, before: list[int], sizes: list[int], sequences: int
) -> set[int]:
    """Return the tokens that the reference may choose after a context, given the logits from passes of different shapes.

    The passes are those of plain decoding and of rounds of these sizes, with one to `sequences` sequences, and the token's row
    may be any of theirs. All passes after the prompt have the same shape.
    """
    sampling = outrider.request(prompt, params).sampling
    sampling.advance(before)
    settings, edits = named_settings(sampling.settings[0]), edits_of(*sampling.table())
    uniforms = sampling.uniforms(sampling.emitted, 1)[:, ACCEPTING.start : DRAWING.stop]
    allowed = np.array(True if sampling.grammar is None else sampling.grammar.masks([])[0][0])
    # In fp32, a uniform may fall on the other side of a boundary, and a token may fall out of the nucleus.
    readings = [
        (settings | {"top_p": min(settings["top_p"] * (1 + wider), 1.0)}, np.clip(uniforms + shift, 0, 1))
        for wider, shift in product((0.0, -TOLERANCE, TOLERANCE), repeat=2)
    ]
    session = outrider.sessions["target"]
    context, start, choices = prompt + before, len(prompt) - 1, set[int]()
    for slot in range(sequences):
        read_context(outrider, prompt[:start], slot)
    for count, rows in product(range(1, sequences + 1), (1, *(size + 1 for size in sizes))):
        for row in range(min(rows, len(before) + 1)):
            end = len(context) + rows - 1 - row
            if end > session.capacity:
                continue
            first = start + (end - start) % rows
            padded = np.array(context + context[-1:] * (end - len(context)))
            for slot in range(count):
                if session.usable(slot, start) < start:
                    read_context(outrider, prompt[:start], slot)
                if first > start:
                    session.write(padded[None, start:first], np.array([start]), slot)
            for at in range(first, end, rows):
                logits = session.run(np.broadcast_to(padded[at : at + rows], (count, rows)), np.full(count, at))
            for each in np.where(allowed, logits[:, row].astype(np.float64), -np.inf):
                choices.update(token for reading in readings for token in verify(each[None], [], each[None], *reading, edits))
    return choices


def count_sampled(outrider: Outrider, watch: Watch, settings: Sequence[tuple[SamplingParams, str]], counters: Counters) -> None:
    """Check the counters of some sampled texts from the public interface, with logprobs and with edits."""
    for params, text in settings:
        prompt = outrider.text.encode(text, chat=False)
        for seed, mode in enumerate(modes(outrider)):
            _generate(outrider, watch, prompt, replace(params, seed=seed, logprobs=3), mode, counters)


def _generate(
    outrider: Outrider,
    watch: Watch,
    prompt: list[int],
    params: SamplingParams,
    mode: DraftingMode,
    counters: Counters,
) -> list[int]:
    """Return a generation's tokens, after checking its counters against the tokens that each pass verified and emitted."""
    tokens: list[int] = []
    drafted = accepted = rejected = 0
    balanced = True
    watch.decided.clear()
    for event in outrider.generate(prompt, params, k=mode.k, drafter=mode.drafter):
        checked, emitted = watch.decided[-1]
        stayed = min(len(emitted) - 1, len(event.token_ids))
        own = len(event.token_ids) - stayed
        balanced &= list(event.token_ids) == emitted[: len(event.token_ids)]
        balanced &= event.from_draft == (True,) * stayed + (False,) * own
        balanced &= len(event.token_ids) == len(emitted) or event.finish_reason is not None
        tokens += event.token_ids
        drafted, accepted = drafted + checked, accepted + stayed
        rejected += own if len(emitted) - 1 < checked else 0
    stats = event.stats
    own = len(tokens) - accepted
    balanced &= stats.rounds == len(watch.decided) and stats.drafted == drafted == sum(stats.drafted_at)
    balanced &= (stats.accepted, stats.rejected, stats.own) == (accepted, rejected, own)
    balanced &= stats.unexamined == drafted - accepted - rejected >= 0 and stats.emitted == len(tokens)
    _count(counters, stats, balanced)
    return tokens


def _count(counters: Counters, stats: Stats, balanced: bool) -> None:
    counters.generations += 1
    counters.unbalanced += not balanced
    counters.drafted += stats.drafted
    counters.accepted += stats.accepted
    counters.rejected += stats.rejected
    counters.unexamined += stats.unexamined
    counters.emitted += stats.emitted
    counters.own += stats.own
