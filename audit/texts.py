"""Whole texts against plain decoding's: drafted ones, and those of requests that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest

import numpy as np

from outrider.audit.controls import RestlessCompany, WatchedRounds
from outrider.audit.report import Counters, Parting, Texts
from outrider.errors import OutriderError
from outrider.progress import Progress
from outrider.runtime.generation import Answer, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import AUTO, MODEL, NGRAM, Company
from outrider.runtime.reference import TOLERANCE, edits_of, named_settings, verify
from outrider.runtime.request import ACCEPTING, DRAWING
from outrider.runtime.scheduler import Job, Scheduler
from outrider.runtime.stats import Stats

LENGTH = 64  # tokens of each prompt's continuation

Way = tuple[int | str, str | None]
"""k and drafter, as `Outrider.generate` takes them."""
PLAIN: Way = (0, None)


def ways(outrider: Outrider) -> list[Way]:
    """Every k of the draft model, n-grams, and all of these in turn."""
    model: list[Way] = [(k, MODEL) for k in outrider.build.k if MODEL in outrider.drafters]
    return [*model, (outrider.build.k[-1], NGRAM), (AUTO, AUTO)]


def compare_greedy(
    outrider: Outrider, watched: WatchedRounds, prompts: Sequence[str], counters: Counters, progress: Progress
) -> Texts:
    """Speculative greedy texts, one at a time, by rounds under watch."""
    found = Texts(len(prompts))
    progress.stage("comparing greedy texts", len(prompts) * (1 + len(ways(outrider))))
    params = SamplingParams(max_new_tokens=LENGTH)
    for text in prompts:
        prompt = outrider.text.encode(text, chat=False)
        plain = _generate(outrider, watched, prompt, params, PLAIN, counters)
        progress.advance(1)
        for way in ways(outrider):
            answer = _generate(outrider, watched, prompt, params, way, counters)
            _compare(outrider, found, text, params, way, plain, answer, sequences=1)
            progress.advance(1)
    return found


class _Companies(Scheduler):
    """Also of texts that are drawn by rejection and a seed: here every run has the same company."""

    def _answer(self, prompt: list[int], params: SamplingParams) -> Answer:
        return self.outrider.answer(prompt, params)


def compare_company(
    outrider: Outrider,
    watched: WatchedRounds,
    prompts: Sequence[str],
    sampled: Sequence[tuple[SamplingParams, str]],
    counters: Counters,
    progress: Progress,
) -> Texts:
    """Texts of requests that share the passes of all slots, come when one is free and leave when they end; against the same
    requests alone, by plain decoding. Greedy ones, some drawn by a seed, and beside them some by the rule of rejection, which
    another k gives other texts: of those the watch alone speaks."""
    drawn = [(replace(params, seed=seed, logprobs=2), text) for seed, (params, text) in enumerate(sampled)]
    asked = [(SamplingParams(), text) for text in prompts]
    asked += [(replace(params, rule=rule), text) for params, text in drawn for rule in ("exact-match", "rejection")]
    asked = [(replace(params, max_new_tokens=LENGTH), text) for params, text in asked]
    alone: list[list[int] | None] = []
    progress.stage("comparing texts in company", len(asked) * (2 + len(ways(outrider))))
    for params, text in asked:
        plain = None
        if params.exact or params.temperature == 0:
            events = outrider.generate(outrider.text.encode(text, chat=False), params, k=0)
            plain = [token for event in events for token in event.token_ids]
        alone.append(plain)
        progress.advance(1)
    found = Texts(sum(plain is not None for plain in alone))
    slots = len(outrider.loop.texts)
    again = 1 + slots // len(asked)  # more requests than there are slots
    for way in (PLAIN, *ways(outrider)):
        together = RestlessCompany if way == (AUTO, AUTO) else Company
        scheduler = _Companies(outrider, max_waiting=again * len(asked), k=way[0], drafter=way[1], company=together)
        watched.decided.clear()
        requests = [(outrider.text.encode(text, chat=False), params) for params, text in asked]
        jobs = scheduler.submit_all(requests * again)
        answers = _played(scheduler, jobs)
        sums = Stats()
        for job, (tokens, accepted), (params, text), plain in zip(jobs, answers, asked * again, alone * again, strict=True):
            if plain is not None:
                _compare(outrider, found, text, params, way, plain, tokens, sequences=slots)
            stats = job.answer.stats
            _count(counters, stats, (stats.emitted, stats.accepted) == (len(tokens), accepted) and stats.unexamined >= 0)
            sums.add(stats)
        drafted = sum(checked for checked, _ in watched.decided)
        counters.unbalanced += (sums.rounds, sums.drafted) != (len(watched.decided), drafted)
        progress.advance(len(asked))
    return found


def _played(scheduler: Scheduler, jobs: Sequence[Job]) -> list[tuple[list[int], int]]:
    """Of all that was submitted, the answer's tokens, and how many of them were drafted."""
    tokens: dict[int, list[int]] = {id(job): [] for job in jobs}
    accepted = dict.fromkeys(tokens, 0)
    while scheduler.busy:
        for job, event in scheduler.step():
            if isinstance(event, OutriderError):
                raise event
            tokens[id(job)] += event.token_ids
            accepted[id(job)] += sum(event.from_draft)
    return list(zip(tokens.values(), accepted.values(), strict=True))


def _compare(
    outrider: Outrider,
    found: Texts,
    text: str,
    params: SamplingParams,
    way: Way,
    plain: list[int],
    answer: list[int],
    sequences: int,
) -> None:
    """Compare the answers of a request; the other one was found in passes of at most so many sequences."""
    found.compared += 1
    if answer == plain:
        return
    place = next(at for at, (one, other) in enumerate(zip_longest(plain, answer)) if one != other)
    ours, theirs = (tokens[place] if place < len(tokens) else -1 for tokens in (plain, answer))
    k, drafter = way
    parting = Parting(text, params.temperature, f"{drafter}, k = {k}" if k else "plain", place, ours, theirs)
    prompt = outrider.text.encode(text, chat=False)
    sizes = [size for size in outrider.build.k if not isinstance(k, int) or size <= k]
    choices = _choices(outrider, prompt, params, plain[:place], sizes, sequences)
    (found.near_ties if {ours, theirs} <= choices else found.differences).append(parting)


def _choices(
    outrider: Outrider, prompt: list[int], params: SamplingParams, before: list[int], sizes: list[int], sequences: int
) -> set[int]:
    """What the reference takes after a context, from the logits of any row of any pass that plain decoding or a round of one of
    these sizes may make, of one to so many sequences; all passes from the prompt's end on are of one shape."""
    request = outrider.request(params, prompt)
    request.advance(before)
    settings, edits = named_settings(request.settings[0]), edits_of(*request.table())
    uniforms = request.uniforms(request.emitted, 1)[:, ACCEPTING.start : DRAWING.stop]
    # In fp32 a uniform may fall on the other side of a boundary, or a token out of the nucleus.
    readings = [
        (settings | {"top_p": min(settings["top_p"] * (1 + wider), 1.0)}, np.clip(uniforms + shift, 0, 1))
        for wider, shift in product((0.0, -TOLERANCE, TOLERANCE), repeat=2)
    ]
    session, chunk = outrider.sessions["target"], outrider.build.max_prompt_chunk
    context, start, found = prompt + before, len(prompt) - 1, set[int]()
    for slot, at in product(range(sequences), range(0, start, chunk)):
        session.write(np.array([prompt[at : min(at + chunk, start)]]), np.array([at]), slot)
    for count, rows in product(range(1, sequences + 1), (1, *(size + 1 for size in sizes))):
        for row in range(min(rows, len(before) + 1)):
            end = len(context) + rows - 1 - row
            if end > session.capacity:
                continue
            first = start + (end - start) % rows
            padded = np.array(context + context[-1:] * (end - len(context)))
            for slot in range(count if first > start else 0):
                session.write(padded[None, start:first], np.array([start]), slot)
            for at in range(first, end, rows):
                logits = session.run(np.broadcast_to(padded[at : at + rows], (count, rows)), np.full(count, at))
            for each in logits[:, row].astype(np.float64):
                found.update(token for reading in readings for token in verify(each[None], [], each[None], *reading, edits))
    return found


def count_sampled(
    outrider: Outrider, watched: WatchedRounds, asked: Sequence[tuple[SamplingParams, str]], counters: Counters
) -> None:
    """Some sampled texts by the public interface, for the counters' sake, with logprobs; and greedy ones with edits."""
    for params, text in asked:
        prompt = outrider.text.encode(text, chat=False)
        for seed, way in enumerate(ways(outrider)):
            _generate(outrider, watched, prompt, replace(params, max_new_tokens=LENGTH, seed=seed, logprobs=3), way, counters)


def _generate(
    outrider: Outrider,
    watched: WatchedRounds,
    prompt: list[int],
    params: SamplingParams,
    way: Way,
    counters: Counters,
) -> list[int]:
    """One generation's tokens. What each verifying pass was given and emitted says what the counters must be."""
    tokens: list[int] = []
    drafted = accepted = rejected = 0
    balanced = True
    watched.decided.clear()
    for event in outrider.generate(prompt, params, k=way[0], drafter=way[1]):
        checked, emitted = watched.decided[-1]
        kept = min(len(emitted) - 1, len(event.token_ids))
        own = len(event.token_ids) - kept
        balanced &= list(event.token_ids) == emitted[: len(event.token_ids)]
        balanced &= event.from_draft == (True,) * kept + (False,) * own
        balanced &= len(event.token_ids) == len(emitted) or event.finish_reason is not None
        tokens += event.token_ids
        drafted, accepted = drafted + checked, accepted + kept
        rejected += own if len(emitted) - 1 < checked else 0
    stats = event.stats
    own = len(tokens) - accepted
    balanced &= stats.rounds == len(watched.decided) and stats.drafted == drafted == sum(stats.drafted_at)
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
