"""The target's own answers, which a draft learns. They are kept in a file, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from outrider.errors import FolderError, OutriderError, UsageError
from outrider.progress import Progress
from outrider.runtime.generation import Event, Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.scheduler import Scheduler
from outrider.runtime.text.chat_template import Chat
from outrider.runtime.text.text import Text
from outrider.training.texts import Sample

HELD_OUT = 20  # one prompt in 20 is held out
MOST_HELD_OUT = 32
FEWEST_PROMPTS = 40
FEWEST_TOKENS = 8  # of an answer, and of a prompt that is the beginning of a text

T = TypeVar("T")


class Example(NamedTuple):
    """Tokens, and a flag for each token that the assistant wrote and the draft has to learn."""

    ids: list[int]
    drafted: list[bool]

    @classmethod
    def of(cls, prompt: list[int], answer: list[int]) -> Example:
        """Join a prompt and its answer."""
        return cls(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    @property
    def learnable(self) -> bool:
        """Whether a head can learn from the tokens: it reads the previous token, and the feature of the token before that."""
        return sum(self.drafted[2:]) > 1


class Given(NamedTuple):
    """An answer from the texts, and the prompt for the target if the answer is held out."""

    example: Example
    prompt: list[int]


class TrainingPrompt(NamedTuple):
    """A prompt for the target."""

    key: str  # a digest of the tokens and the settings
    ids: list[int]
    seed: int | None  # None if the answer is greedy


class TrainingAnswer(msgspec.Struct, array_like=True):
    """One line of the file of answers."""

    key: str
    ids: list[int]


def prompts_of(samples: Sequence[Sample], text: Text, longest: int, seed: int = 0) -> list[list[int]]:
    """Return the tokens of the prompts for the target, without duplicates and prompts that leave no room for an answer.

    A conversation ends before its last answer. A plain text is cut into passages of at most `longest` tokens; a prompt is the
    beginning of a passage, at most half of it.

    Raises:
        UsageError: a conversation needs a chat template that the target lacks, or there are too few prompts.
    """

    def prompts(sample: Sample) -> Iterator[list[int]]:
        if sample.messages is not None:
            messages = [msgspec.structs.asdict(each) for each in sample.messages]
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if messages:
                yield text.encode_chat(Chat(messages))
        elif sample.prompt is not None:
            yield text.encode(sample.prompt, chat=text.template is not None)
        else:
            for passage in _passages(sample, text, longest):
                yield _beginning(passage, seed)

    return _usable(samples, text, longest, prompts, lambda ids: ids if ids and len(ids) + FEWEST_TOKENS <= longest else None)


def given_examples(samples: Sequence[Sample], text: Text, longest: int, ends: Sequence[int], seed: int = 0) -> list[Given]:
    """Return the answers in conversations, and passages of plain texts. All tokens of a passage are learned.

    Each assistant turn becomes one example. Its prompt is what a server would make of the earlier turns.

    Args:
        samples: the texts.
        text: the target's tokenizer and chat template.
        longest: the most tokens of a prompt and its answer.
        ends: the tokens that end an answer.
        seed: decides where passages are cut.

    Raises:
        UsageError: a conversation needs a chat template that the target lacks, or too few samples have assistant tokens.
    """

    def examples(sample: Sample) -> Iterator[Given]:
        if sample.text is not None:
            for ids in _passages(sample, text, longest):
                yield Given(Example(ids, [False] + [True] * (len(ids) - 1)), _beginning(ids, seed))
        messages = [msgspec.structs.asdict(each) for each in sample.messages or []]
        for end in (index for index, each in enumerate(messages) if index and each["role"] == "assistant"):
            before = text.render(Chat(messages[:end]))
            after = text.render(Chat(messages[: end + 1], add_generation_prompt=False))
            if after.startswith(before):
                prompt = text.encode_chat(Chat(messages[:end]))
                answer = text.tokenizer.encode(after.removeprefix(before), add_special_tokens=False).ids
                last = next((at for at, token in enumerate(answer) if token in ends), len(answer))
                room = max(longest - len(prompt), 0)
                yield Given(Example.of(prompt, answer[: last + 1][:room]), prompt)

    def usable(given: Given) -> object:
        return given.example.ids if given.example.learnable and given.prompt else None

    return _usable(samples, text, longest, examples, usable)


def _passages(sample: Sample, text: Text, longest: int) -> Iterator[list[int]]:
    ids = text.encode(sample.text or "", chat=False)
    return (ids[at : at + longest] for at in range(0, len(ids), longest))


def _beginning(passage: list[int], seed: int) -> list[int]:
    most = len(passage) // 2
    return passage[: random.Random(repr((seed, passage))).randint(FEWEST_TOKENS, most)] if most >= FEWEST_TOKENS else []


def _usable(
    samples: Sequence[Sample],
    text: Text,
    longest: int,
    read: Callable[[Sample], Iterator[T]],
    identity: Callable[[T], object],
) -> list[T]:
    """Read all samples. Drop items whose `identity` is None, and items with the same identity as an earlier one."""
    if text.template is None and any(sample.messages is not None for sample in samples):
        raise UsageError("the texts have conversations, and the target has no chat template", "use prompts or plain texts")
    kept: dict[str, T] = {}
    reason = ""
    for number, sample in enumerate(samples, 1):
        try:
            for each in read(sample):
                if (own := identity(each)) is not None:
                    kept.setdefault(repr(own), each)
        except UsageError as error:
            reason = reason or f"; sample {number}: {error}"
    if len(kept) < FEWEST_PROMPTS:
        raise UsageError(
            f"the texts have {len(kept)} different usable prompts, but training needs at least {FEWEST_PROMPTS}, each with room"
            f" for an answer in {longest:,} tokens{reason}",
            "add texts, or raise --max-length",
            param="texts",
        )
    return [*kept.values()]


def held_out(count: int) -> list[bool]:
    """Return which of `count` prompts are held out."""
    step = max(HELD_OUT, -(-count // MOST_HELD_OUT))
    return [index % step == 0 for index in range(count)]


class AnswerStore:
    """One target's answers to prompts. Each is appended to a file when it is complete."""

    def __init__(self, path: Path, target: str, params: SamplingParams, longest: int):
        """Read the file, and cut it off at the first damaged line, which an interrupted run or a system crash may leave.

        Args:
            path: the file.
            target: identifies the target, because other targets give other answers.
            params: the sampling settings of the answers.
            longest: the most tokens of a prompt and its answer.

        Raises:
            FolderError: the path is a link, or not a regular file.
        """
        self._path, self._params, self._longest = path, params, longest
        self._settings = f"{target} {params.max_new_tokens} {longest}"
        self.known: dict[str, list[int]] = {}
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise FolderError(f"{path} is a link, or not a regular file", "remove it, and run again")
        if path.exists():
            whole = 0
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    answer = msgspec.json.decode(line, type=TrainingAnswer)
                except (msgspec.DecodeError, RecursionError):
                    break
                if not line.endswith(b"\n"):
                    break
                self.known[answer.key] = answer.ids
                whole += len(line)
            os.truncate(path, whole)

    def prompt(self, ids: list[int], seed: int | None) -> TrainingPrompt:
        """Return a prompt with its key. Without a seed its answer is greedy."""
        content = msgspec.json.encode([self._settings, ids, None if seed is None else (seed, self._params.temperature)])
        return TrainingPrompt(hashlib.sha256(content).hexdigest()[:16], ids, seed)

    def generate(self, outrider: Outrider, prompts: Sequence[TrainingPrompt], progress: Progress) -> None:
        """Generate the missing answers in batches.

        Raises:
            EngineError: the target failed.
            OSError: the file cannot be written.
        """
        missing = [prompt for prompt in prompts if prompt.key not in self.known]
        if not missing:
            return
        waiting = sorted(missing, key=lambda prompt: len(prompt.ids), reverse=True)
        progress.stage("generating answers with the target", len(waiting))
        scheduler = Scheduler(outrider, max_waiting=1)
        running: dict[int, tuple[TrainingPrompt, list[int]]] = {}
        with open(self._path, "ab") as file:
            while waiting or scheduler.busy:
                while waiting and scheduler.waiting().total() < scheduler.places:
                    prompt = waiting.pop()
                    room = min(self._params.max_new_tokens, self._longest - len(prompt.ids))
                    temperature = 0.0 if prompt.seed is None else self._params.temperature
                    params = SamplingParams(max_new_tokens=room, temperature=temperature, seed=prompt.seed)
                    running[id(scheduler.submit(prompt.ids, params))] = prompt, []
                for request, event in scheduler.step():
                    if isinstance(event, OutriderError):
                        raise event
                    if not isinstance(event, Event):
                        continue
                    prompt, ids = running[id(request)]
                    ids += event.token_ids
                    if event.finish_reason is not None:
                        del running[id(request)]
                        file.write(msgspec.json.encode(TrainingAnswer(prompt.key, ids)) + b"\n")
                        file.flush()
                        self.known[prompt.key] = ids
                        progress.advance(1)

    def example(self, prompt: TrainingPrompt) -> Example:
        """Return a prompt with its answer."""
        return Example.of(prompt.ids, self.known[prompt.key])
