"""Measures plain decoding and every mode of drafting side by side on the same prompts."""

from __future__ import annotations

import datetime
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

import outrider
from outrider.bench.results import SCHEMA, Mode, Results
from outrider.bench.simulator import Trace, compare, reader
from outrider.bench.summary import PLAIN, Answers, AnswerSummary, parts, summarize
from outrider.builder.passes import PassKey, Stopwatch, Timed, all_passes, sampling, steps
from outrider.builder.workloads import Prompt
from outrider.bundle.manifest import Build
from outrider.engines.device import Device
from outrider.engines.threads import processor_name
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime import drafters
from outrider.runtime.drafters.base import DeviceDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy.choice import AUTO
from outrider.runtime.policy.round_costs import RoundCosts

WARM_TOKENS = 8


def modes(loaded: Outrider, k: Sequence[int] | None) -> list[Mode]:
    """Return the modes to measure: plain decoding, each k of the drafters on the device, the default k of the other drafters,
    and k = auto. If no drafter runs on the device, the first one gets each k. If k is [0], only plain decoding and k = auto.

    Raises:
        UsageError: a k was not built.
    """
    sizes = sorted(set(loaded.build.k if k is None else k) - {0})
    if missing := [each for each in sizes if each not in loaded.build.k]:
        built = ", ".join(map(str, loaded.build.k))
        raise UsageError(f"k = {missing[0]} was not built into this bundle; it has k = {built}", "choose one of these")
    every = drafters.on_device(loaded.drafters) or loaded.drafters[:1]
    drafted = [
        Mode(drafter=name, k=each)
        for name in loaded.drafters
        for each in (sizes if name in every else [loaded.default_k])
        if sizes
    ]
    return [PLAIN, *drafted, Mode(drafter=AUTO, k=AUTO)]


def measure(
    loaded: Outrider,
    prompts: Sequence[Prompt],
    *,
    k: Sequence[int] | None = None,
    rounds: int = 3,
    max_new_tokens: int = 64,
    chat: bool = False,
    bundle: str = "",
    command: str = "",
    progress: Progress = SILENT,
) -> Results:
    """Measure every mode on every prompt, greedy, in each of `rounds` rounds. All modes take turns on a prompt.

    Predictions use passes timed in the same run, because the machine may be faster or slower than when the bundle's costs were
    measured. An interrupt or a failure after the first round ends the run; the results have the complete rounds.

    Raises:
        UsageError: a k was not built, or a prompt does not fit the bundle.
        EngineError: a run failed in the first round.
    """
    contestants = modes(loaded, k)
    encoded = _encode(loaded, prompts, chat)
    for mode in contestants:  # warm up, so that no mode pays for one-time setup
        _answer(loaded, encoded[0], SamplingParams(max_new_tokens=WARM_TOKENS), mode)
    loaded.policy = loaded.adaptive_policy()  # forget the warm-up, whose times include the creation of buffers
    stopwatch = _stopwatch(loaded, max(map(len, encoded)) + max_new_tokens)
    stopwatch.run()
    progress.stage("measuring", rounds * len(prompts) * len(contestants))
    answers = _take_turns(loaded, encoded, contestants, rounds, max_new_tokens, stopwatch, progress)
    progress.stage("replaying", len(prompts))
    traces = []
    for prompt, ids, answer in zip(prompts, encoded, answers[PLAIN][0], strict=True):
        most = min(max_new_tokens, loaded.build.capacity - len(ids) + 1)
        traces.append(trace(loaded, prompt.workload, ids, answer.tokens, most))
        progress.advance(1)
    costs = RoundCosts(loaded.manifest, msgspec.structs.replace(loaded.build, costs=stopwatch.costs()))
    manifest, build = loaded.manifest, loaded.build
    texts, summaries = summarize(traces, answers, costs)
    return Results(
        schema=SCHEMA,
        bundle=bundle,
        target=Path(manifest.models["target"].source).name,
        drafts=[Path(manifest.models[role].source).name for role in manifest.roles[1:]],
        precision=", ".join(dict.fromkeys(model.precision for model in manifest.models.values())),
        backend=f"{build.backend} {build.backend_version}, {loaded.engines.device.name}",
        machine=machine(loaded.engines.device),
        date=str(datetime.date.today()),
        outrider=outrider.__version__,
        command=command,
        max_new_tokens=max_new_tokens,
        chat=chat,
        rounds=len(answers[PLAIN]),
        summaries=summaries,
        texts=texts,
        parts=parts(traces, answers, costs),
        policies=compare(traces, costs, loaded.drafters, loaded.engines.device.synchronous),
        traces=traces,
    )


def _encode(loaded: Outrider, prompts: Sequence[Prompt], chat: bool) -> list[list[int]]:
    encoded = []
    for prompt in prompts:
        ids = loaded.text.encode(prompt.prompt, chat=chat)
        if not 0 < len(ids) <= loaded.build.capacity:
            raise UsageError(
                f"a prompt of {prompt.workload} has {len(ids):,} tokens, and the bundle's capacity is"
                f" {loaded.build.capacity:,}: {prompt.prompt[:40]!r}",
                "leave it out, or build the engine with a larger --capacity",
            )
        encoded.append(ids)
    return encoded


def _take_turns(
    loaded: Outrider,
    encoded: Sequence[list[int]],
    contestants: Sequence[Mode],
    rounds: int,
    max_new_tokens: int,
    stopwatch: Stopwatch,
    progress: Progress,
) -> Answers:
    """Return each mode's answers, by round and prompt. Before each prompt, time the passes that its text needs."""
    params = SamplingParams(max_new_tokens=max_new_tokens)
    answers: Answers = {mode: [] for mode in contestants}
    number = 0
    try:
        for number in range(rounds):
            for each in answers.values():
                each.append([])
            for at, ids in enumerate(encoded):
                stopwatch.run(wanted=_made_by(loaded.build, len(ids), len(ids) + max_new_tokens))
                first = (number + at) % len(contestants)
                for mode in (*contestants[first:], *contestants[:first]):
                    answers[mode][-1].append(_answer(loaded, ids, params, mode))
                    progress.advance(1)
    except (KeyboardInterrupt, EngineError) as error:  # hours of measuring must not be lost
        if number == 0:
            raise
        progress.stage(f"{str(error) or 'interrupted (a second interrupt discards everything)'}; complete rounds: {number}")
        for each in answers.values():
            del each[number:]
    return answers


def _windows(build: Build, shortest: int, longest: int) -> list[int]:
    """Return the windows in which passes end, for texts of these lengths and the tokens drafted after their last token."""
    first, last = (bisect_left(build.windows, min(end, build.capacity)) for end in (shortest, longest + build.k[-1]))
    return build.windows[first : last + 1]


def _made_by(build: Build, shortest: int, longest: int) -> Callable[[PassKey], bool]:
    """Return a filter for the passes of texts of these lengths. Always includes the drafters' passes over a prompt chunk."""
    reached = (0, *_windows(build, shortest, longest))
    return lambda each: each[2] in reached or (each[1] == build.max_prompt_chunk and each[0] != "target")


def _stopwatch(loaded: Outrider, longest: int) -> Stopwatch:
    """Return a stopwatch for the passes of rounds on texts of up to `longest` tokens, with the loaded engines."""
    build, device = loaded.build, loaded.engines.device
    reached = (0, *_windows(build, 1, longest))
    passes: dict[PassKey, Timed] = {}
    for name in loaded.manifest.engines:
        wanted = [each for each in all_passes(name, build) if each[2] in reached and each[3] == 1]
        if name in loaded.sessions:
            passes |= steps(loaded.sessions[name], build, wanted)
        else:
            passes |= {each: sampling(loaded.samplers[name], device, loaded.manifest, build, each) for each in wanted}
    return Stopwatch(passes)


def _answer(loaded: Outrider, prompt: list[int], params: SamplingParams, mode: Mode) -> AnswerSummary:
    started = time.perf_counter()
    tokens: list[int] = []
    arrivals = []
    for event in loaded.generate(prompt, params, k=mode.k, drafter=None if mode == PLAIN else mode.drafter):
        arrivals.append((time.perf_counter() - started, len(event.token_ids)))
        tokens += event.token_ids
    stats = event.stats
    return AnswerSummary(tokens, stats.seconds - stats.prompt_seconds, arrivals, stats)


def trace(loaded: Outrider, workload: str, prompt: list[int], tokens: list[int], most: int = 0) -> Trace:
    """Return the record of a text of at most `most` tokens, with what each drafter on the device would have proposed."""
    agrees, confidences = {}, {}
    for _ in loaded.generate((prompt + tokens)[:-1], SamplingParams(max_new_tokens=1), k=0):
        pass  # the target reads the text, for drafters that use its features
    for name, drafter in loaded.decoder.drafters.items():
        if isinstance(drafter, DeviceDrafter):
            for window in (0, *(each for each in drafter.windows if each < len(prompt))):
                by = reader(name, window)
                agrees[by], confidences[by] = drafter.agreement(prompt[-window:], tokens)
    return Trace(workload, prompt, tokens, agrees, confidences, most)


def machine(device: Device) -> str:
    """Describe the machine: the processor if known, the cores that this process may use, and the device if it is a GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    description = f"{processor_name()}, {cores} cores"
    return description if device.synchronous else f"{description}, {device.name}"
