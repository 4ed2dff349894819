"""The draft-verify loop. No backend in it: rounds run engines, this decides which rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.errors import EngineError
from outrider.runtime.drafter import ModelDrafter
from outrider.runtime.launches import Idle, Turn
from outrider.runtime.ngram import NgramDrafter
from outrider.runtime.policy import MODEL, NGRAM, NONE, PLAIN, Acceptance, Choice, Chooser, Company, Member
from outrider.runtime.request import Logprobs, Request
from outrider.runtime.rounds import Rounds, Verdict


@dataclass(frozen=True, slots=True)
class Round:
    """What one pass of the target decided."""

    drafter: str  # of `policy.DRAFTERS`, or `policy.NONE`
    drafted: int  # tokens that it checked
    tokens: list[int]  # the accepted ones, and one of the target's own
    logprobs: list[Logprobs] | None  # of each, where the request asks for them


class Text:
    """One text in a slot.

    `tokens` are the confirmed ones. Once the prompt is read, all but the last are in the target's cache, at their own index;
    whatever a rejected token left behind it is overwritten by the next round, because that round writes from a smaller
    position.
    """

    request: Request
    chooser: Chooser  # where it runs alone
    acceptance: Acceptance  # where it runs in company

    def __init__(self, slot: int, drafter: ModelDrafter | None):
        self.slot = slot
        self.drafter = drafter
        self.ngrams = NgramDrafter()
        self.tokens: list[int] = []
        self.read = 0  # tokens in the target's cache, while the prompt is read
        self.proven = True  # whether all logits that came of the caches were numbers

    def begin(self, prompt: list[int], request: Request, kept: int = 0) -> None:
        """Another text, of which the caches hold the first `kept` tokens."""
        if self.drafter is not None:
            self.drafter.rewind(kept)
        self.ngrams.rewind(kept)
        self.tokens = list(prompt)
        self.request = request
        self.read = min(kept, len(prompt) - 1)
        self.proven = False

    def end(self) -> None:
        """Give the text up; whatever its caches hold may be overwritten."""
        self.tokens, self.read = [], 0
        self.ngrams.rewind(0)
        if self.drafter is not None:
            self.drafter.rewind(0)

    def shared(self, prompt: list[int]) -> int:
        """Tokens at a prompt's beginning that the target's cache holds."""
        held = self.tokens[: self.read]
        return next((at for at, (a, b) in enumerate(zip(held, prompt, strict=False)) if a != b), min(len(held), len(prompt)))

    @property
    def unread(self) -> int:
        """Tokens of the prompt that are not in the target's cache yet; the first round begins with the last one."""
        return max(len(self.tokens) - 1 - self.read, 0)

    @property
    def missing(self) -> int:
        """Confirmed tokens that the draft's cache lacks."""
        return 0 if self.drafter is None else self.drafter.missing(self.tokens)

    def proposal(self, most: int) -> tuple[list[int], int]:
        """What n-grams propose; see `NgramDrafter.propose`."""
        self.ngrams.extend(self.tokens[self.ngrams.length :])
        return self.ngrams.propose(most)

    def advance(self, tokens: list[int]) -> None:
        """Take in what a round confirmed."""
        self.tokens += tokens
        self.read = len(self.tokens) - 1
        self.proven = True
        self.request.advance(tokens)


class Loop:
    """Texts in the slots of the sessions of a target and, where there is one, a draft."""

    def __init__(self, rounds: Rounds, k: list[int], chunk: int, clock: Callable[[], float] = time.perf_counter):
        """`k` are the built numbers of draft tokens, `chunk` the longest prefill run, `clock` tells seconds."""
        self.rounds = rounds
        sessions = rounds.launches.sessions
        self.target = sessions["target"]
        self.draft = sessions.get("draft")
        self.texts = [
            Text(slot, ModelDrafter(self.draft, chunk, slot) if self.draft is not None else None)
            for slot in range(self.target.batch)
        ]
        self._k = sorted({0, *k})
        self._chunk = chunk
        self._clock = clock

    def start(self, prompt: list[int], request: Request, chooser: Chooser, wanted: int) -> float:
        """Put the prompt into the target's cache, in the first slot, but for its last token, with which the first round
        begins; and into the draft's, where the chooser will want it for so many wanted tokens.

        Returns:
            the seconds that the draft's took.
        """
        text = self.texts[0]
        text.begin(prompt, request)
        text.chooser = chooser
        while text.unread:
            self.read(text)
        self.target.device.synchronize()
        if text.drafter is None or not chooser.reads(len(prompt), wanted):
            return 0.0
        started = self._clock()
        text.drafter.catch_up(prompt)
        self.target.device.synchronize()
        return self._clock() - started

    def read(self, text: Text) -> None:
        """Put another chunk of a prompt into the target's cache."""
        chunk = text.tokens[text.read : min(text.read + self._chunk, len(text.tokens) - 1)]
        self.target.write(np.array([chunk], dtype=np.int64), np.array([text.read], dtype=np.int64), text.slot)
        text.read += len(chunk)

    def move(self, text: Text, slot: int) -> None:
        """Bring a text into another slot, whose own text is given up."""
        self.target.move(text.slot, slot, text.read)
        if text.drafter is not None:
            text.drafter.session.move(text.slot, slot, len(text.drafter.written))
        other, before = self.texts[slot], text.slot
        self.texts[slot], self.texts[before] = text, other
        for each, place in ((text, slot), (other, before)):
            each.slot = place
            if each.drafter is not None:
                each.drafter.slot = place
        other.end()

    def clear(self, text: Text) -> None:
        """Give a text up whose caches may hold what is no number."""
        self.target.clear(text.slot)
        if self.draft is not None:
            self.draft.clear(text.slot)
        text.end()

    def round(self, text: Text, wanted: int, chunks: int | None = None) -> Round:
        """Draft tokens as the text's chooser says, verify them in one pass of the target, and confirm the accepted ones and
        one more.

        Never emits more than `wanted` tokens: near the end fewer are drafted, and the rows left over in the built
        shape are padding that nobody looks at. Where the draft has to read first, and takes more than so many `chunks`, it
        reads these, and drafts in a round to come.

        Raises:
            EngineError: the text's logits are not finite numbers, or the backend failed.
        """
        length, chooser = len(text.tokens), text.chooser
        proposed, agreeing = text.proposal(self._k[-1]) if chooser.looks_up else ([], 0)
        missing = text.missing
        choice = chooser.choose(length, missing, agreeing, wanted)
        rows, count = self._shape(choice.k, wanted, length)
        confidences: list[float] = []
        shorter = None
        if choice.drafter == MODEL and count:
            assert text.drafter is not None
            if missing:
                text.drafter.catch_up(text.tokens, chunks)
                self.target.device.synchronize()  # it is not of the round, whose time is taken
                if text.missing:
                    rows, count = 1, 0
            if chooser.stops and count:

                def shorter(confidence: float) -> int | None:
                    confidences.append(confidence)
                    if chooser.worth(confidences, count, length):
                        return None
                    return self._size(len(confidences)) + 1

        given = choice.drafter == NGRAM and count > 0
        turn = Turn(text.tokens, text.request, count, proposed[:count] if given else [])
        started = self._clock()
        (found,) = self.rounds.run([turn], rows, first=text.slot, given=given, shorter=shorter)
        took = 1000 * (self._clock() - started)
        if not isinstance(found, Verdict):
            assert found is not None
            raise found
        accepted = len(found.tokens) - 1
        if choice.drafter == MODEL and found.drafted:
            assert text.drafter is not None
            text.drafter.wrote(text.tokens, found.drafted)
            chooser.observe_confidences(confidences, accepted)
        done = Choice(choice.drafter, self._size(len(found.drafted))) if found.drafted else PLAIN
        chooser.observe(done, len(found.drafted), accepted, length, took)
        if agreeing:
            chooser.observe_lookup(agreeing, proposed, found.tokens)
        text.advance(found.tokens)
        return Round(done.drafter, len(found.drafted), found.tokens, found.logprobs)

    def round_together(self, texts: Sequence[Text], wanted: Sequence[int], company: Company) -> list[Round | EngineError]:
        """A round of several texts, whose prompts are read, in one pass of each model: one drafter and one k for all.

        Raises:
            EngineError: the backend failed; nothing was confirmed.
        """
        proposals = [text.proposal(self._k[-1]) if company.looks_up else ([], 0) for text in texts]
        members = [
            Member(len(text.tokens), text.missing, agreeing, most, text.acceptance, text.request.greedy)
            for text, (_, agreeing), most in zip(texts, proposals, wanted, strict=True)
        ]
        choice = company.choose(members)
        first, last = min(text.slot for text in texts), max(text.slot for text in texts)
        between = self.texts[first : last + 1]
        longest = max(text.read + 1 for text in between)
        size, _ = self._shape(choice.k, max(wanted), longest)
        counts = []
        for text, most, (proposed, _) in zip(texts, wanted, proposals, strict=True):
            count = min(size - 1, most - 1)
            if choice.drafter == MODEL and count:
                assert text.drafter is not None
                text.drafter.catch_up(text.tokens, chunks=1)  # a long text takes several rounds, so that no one waits for it
                count = 0 if text.missing or len(text.tokens) < 2 else count
            counts.append(min(count, len(proposed)) if choice.drafter == NGRAM else count)
        choice = Choice(choice.drafter, self._size(max(counts))) if any(counts) else PLAIN
        turns: list[Turn | Idle] = [
            Idle(text.read, 0 if text.drafter is None else len(text.drafter.written)) for text in between
        ]
        for text, count, (proposed, _) in zip(texts, counts, proposals, strict=True):
            given = proposed[:count] if choice.drafter == NGRAM else []
            turns[text.slot - first] = Turn(text.tokens, text.request, count, given)
        self.target.device.synchronize()  # what was read before is not of the round, whose time is taken
        started = self._clock()
        found = self.rounds.run(turns, choice.k + 1, first=first, given=choice.drafter == NGRAM)
        took = 1000 * (self._clock() - started)
        company.observe(choice, members, took)
        done: list[Round | EngineError] = []
        for text, (proposed, agreeing) in zip(texts, proposals, strict=True):
            verdict = found[text.slot - first]
            if not isinstance(verdict, Verdict):
                assert verdict is not None
                done.append(verdict)
                continue
            drafted = len(verdict.drafted)
            if choice.drafter == MODEL and text.drafter is not None:
                if drafted:
                    text.drafter.wrote(text.tokens, verdict.drafted)
                else:  # what the pass wrote there is nobody's
                    text.drafter.rewind(max(len(text.tokens) - 2, 0))
            company.observe_text(choice.drafter, text.acceptance, drafted, len(verdict.tokens) - 1)
            if agreeing:
                company.observe_lookup(agreeing, proposed, verdict.tokens)
            text.advance(verdict.tokens)
            done.append(Round(choice.drafter if drafted else NONE, drafted, verdict.tokens, verdict.logprobs))
        return done

    def _size(self, drafted: int) -> int:
        """The built k that so many drafted tokens need."""
        return next(size for size in self._k if size >= drafted)

    def _shape(self, k: int, wanted: int, length: int) -> tuple[int, int]:
        """(rows of the target's pass, tokens to draft): the smallest built shape for as many tokens as are useful, or
        the largest that the capacity still holds behind so many confirmed tokens."""
        slots = self.target.capacity - length  # rows that fit after the last confirmed token's own
        useful = min(k, wanted - 1)
        built = [size for size in self._k if size <= min(k, slots)]
        size = next((size for size in built if size >= useful), built[-1])
        return size + 1, min(size, useful)
