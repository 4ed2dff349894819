"""Plain decoding and every mode of drafting, side by side on the same prompts."""

from __future__ import annotations

import datetime
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

import msgspec

import outrider
from outrider.bench.results import SCHEMA, Mode, Part, Percentiles, PromptResult, Results, Summary
from outrider.bench.simulator import Trace, compare, replay
from outrider.bundle.manifest import Build
from outrider.calibration.passes import Pass, Stopwatch, sampler_rows, sampling, steps
from outrider.calibration.workloads import Prompt
from outrider.engines.device import Device
from outrider.errors import EngineError, UsageError
from outrider.progress import SILENT, Progress
from outrider.runtime import drafters
from outrider.runtime.choice import AUTO
from outrider.runtime.costs import Costs
from outrider.runtime.drafters.base import NONE, DeviceDrafter
from outrider.runtime.generation import Outrider
from outrider.runtime.params import SamplingParams
from outrider.runtime.policy import FixedPolicy
from outrider.runtime.stats import Stats

PLAIN = Mode(drafter=NONE, k=0)
WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Answer:
    """One text."""

    tokens: list[int]
    seconds: float  # after the target has read the prompt, the draft's reading included
    arrivals: list[tuple[float, int]]  # seconds since the request, and tokens that came then
    stats: Stats

    @property
    def per_token(self) -> float:
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / max(len(self.tokens) - self.arrivals[0][1], 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the next."""
        gaps = [0.0] * (self.arrivals[0][1] - 1)
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps += [now - before, *[0.0] * (count - 1)]
        return gaps


def modes(loaded: Outrider, k: Sequence[int] | None) -> list[Mode]:
    """What is measured by default: plain decoding, each k of the model and the default k of n-grams, or each of theirs where
    there is no model, and what chooses itself.

    Raises:
        UsageError: a k was not built.
    """
    asked = sorted(set(loaded.build.k if k is None else k) - {0})
    if missing := [each for each in asked if each not in loaded.build.k]:
        built = ", ".join(map(str, loaded.build.k))
        raise UsageError(f"k = {missing[0]} was not built into this bundle; it has k = {built}", "choose of these")
    first, *others = loaded.drafters
    drafted = [Mode(drafter=first, k=each) for each in asked] + [Mode(drafter=name, k=loaded.default_k) for name in others]
    if not drafted:
        drafted = [Mode(drafter=first, k=loaded.default_k)]
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
    """Every mode on every prompt, greedy, in each of `rounds` rounds; all modes take turns on a prompt before the next one.

    What is predicted comes from passes timed in the same run, before every prompt those that its texts make: a machine is
    not always as fast as it was when the bundle's costs were measured. An interrupt or a failure after the first round ends it
    with the whole rounds.

    Raises:
        UsageError: a k was not built, or a prompt does not fit the bundle.
        EngineError: a run failed in the first round.
    """
    contestants = modes(loaded, k)
    params = SamplingParams(max_new_tokens=max_new_tokens)
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
    for mode in contestants:  # so that no mode pays for what is made once
        _answer(loaded, encoded[0], SamplingParams(max_new_tokens=WARM_TOKENS), mode)
    loaded.policy = loaded.adaptive_policy()  # what it learned meanwhile includes the making of buffers
    answers: dict[tuple[str, str | int], list[list[Answer]]] = {(mode.drafter, mode.k): [] for mode in contestants}
    stopwatch = _stopwatch(loaded, max(map(len, encoded)) + max_new_tokens)
    stopwatch.run()
    progress.stage("measuring", rounds * len(prompts) * len(contestants))
    number = 0
    try:
        for number in range(rounds):
            for each in answers.values():
                each.append([])
            for at, ids in enumerate(encoded):
                stopwatch.run(wanted=_made_by(loaded.build, len(ids), len(ids) + max_new_tokens))
                first = (number + at) % len(contestants)
                for mode in contestants[first:] + contestants[:first]:
                    answers[mode.drafter, mode.k][-1].append(_answer(loaded, ids, params, mode))
                    progress.advance(1)
    except (KeyboardInterrupt, EngineError) as error:  # hours of measuring are not for nothing
        if number == 0:
            raise
        rounds = number
        progress.stage(f"{str(error) or 'interrupted (once more drops all)'}; whole rounds that are kept: {rounds}")
        for each in answers.values():
            del each[rounds:]
    plain = answers[PLAIN.drafter, PLAIN.k]
    progress.stage("replaying", len(prompts))
    traces = []
    for prompt, ids, answer in zip(prompts, encoded, plain[0], strict=True):
        most = min(max_new_tokens, loaded.build.capacity - len(ids) + 1)
        traces.append(trace(loaded, prompt.workload, ids, answer.tokens, most))
        progress.advance(1)
    costs = Costs(loaded.manifest, msgspec.structs.replace(loaded.build, costs=stopwatch.costs()))
    texts = [
        _text(at, mode, traces[at], [each[at] for each in answers[mode.drafter, mode.k]], [each[at] for each in plain], costs)
        for at in range(len(prompts))
        for mode in contestants
    ]
    summaries = []
    for workload in dict.fromkeys(prompt.workload for prompt in prompts):
        for mode in contestants:
            own = [text for text in texts if (text.workload, text.mode) == (workload, mode)]
            taken = [[each[text.prompt] for text in own] for each in answers[mode.drafter, mode.k]]
            summaries.append(_summary(own, taken, [[each[text.prompt] for text in own] for each in plain]))
    manifest, build = loaded.manifest, loaded.build
    middle = sum(len(each.prompt) + len(each.tokens) // 2 for each in traces) // len(traces)
    return Results(
        schema=SCHEMA,
        bundle=bundle,
        target=Path(manifest.models["target"].source).name,
        draft=Path(manifest.models["draft"].source).name if "draft" in manifest.models else None,
        precision=", ".join(dict.fromkeys(model.precision for model in manifest.models.values())),
        backend=f"{build.backend} {build.backend_version}, {loaded.engines.device.name}",
        machine=machine(loaded.engines.device),
        date=str(datetime.date.today()),
        outrider=outrider.__version__,
        command=command,
        max_new_tokens=max_new_tokens,
        chat=chat,
        rounds=rounds,
        summaries=summaries,
        texts=texts,
        parts=[
            _part(mode, costs, middle, [answer for each in answers[mode.drafter, mode.k] for answer in each])
            for mode in contestants
            if isinstance(mode.k, int)
        ],
        policies=compare(traces, costs, loaded.policy.early_stopping),
        traces=traces,
    )


def _windows(build: Build, shortest: int, longest: int) -> list[int]:
    """Those in which passes end of texts with so many tokens, what is drafted behind the last one included."""
    first, last = (bisect_left(build.windows, min(end, build.capacity)) for end in (shortest, longest + build.k[-1]))
    return build.windows[first : last + 1]


def _made_by(build: Build, shortest: int, longest: int) -> Callable[[Pass], bool]:
    """Which passes texts of such lengths make; a prompt's chunk is timed in two windows for all."""
    reached = (0, *_windows(build, shortest, longest))
    return lambda each: each[2] in reached or (each[1] == build.max_prompt_chunk and each[0] != "target")


def _stopwatch(loaded: Outrider, longest: int) -> Stopwatch:
    """The passes of rounds on texts of up to so many tokens, on the engines that make them."""
    build = loaded.build
    reached = _windows(build, 1, longest)
    passes: dict[Pass, Callable[[], None]] = {}
    for role, session in loaded.sessions.items():
        passes |= steps(session, role, build, reached)
    for name, engine in loaded.samplers.items():
        for rows in sampler_rows(name, build):
            passes |= sampling(engine, loaded.engines.device, name, loaded.manifest, build, rows, 1)
    return Stopwatch(passes)


def _answer(loaded: Outrider, prompt: list[int], params: SamplingParams, mode: Mode) -> Answer:
    started = time.perf_counter()
    tokens: list[int] = []
    arrivals = []
    for event in loaded.generate(prompt, params, k=mode.k, drafter=None if mode == PLAIN else mode.drafter):
        arrivals.append((time.perf_counter() - started, len(event.token_ids)))
        tokens += event.token_ids
    stats = event.stats
    return Answer(tokens, stats.seconds - stats.prompt_seconds + stats.draft_prompt_seconds, arrivals, stats)


def _total(answers: list[Answer]) -> Stats:
    total = Stats()
    for answer in answers:
        total.add(answer.stats)
    return total


def _text(prompt: int, mode: Mode, trace: Trace, taken: list[Answer], plain: list[Answer], costs: Costs) -> PromptResult:
    total = _total(taken)
    predicted = None
    if isinstance(mode.k, int):
        predicted = replay(trace, costs, FixedPolicy(NONE, 0)) / replay(trace, costs, FixedPolicy(mode.drafter, mode.k))
    return PromptResult(
        workload=trace.workload,
        prompt=prompt,
        mode=mode,
        tokens=len(taken[0].tokens),
        tokens_per_second=[len(answer.tokens) / answer.seconds for answer in taken],
        speedup=[p.seconds / a.seconds * len(a.tokens) / len(p.tokens) for a, p in zip(taken, plain, strict=True)],
        predicted_speedup=predicted,
        first_token=[1000 * answer.arrivals[0][0] for answer in taken],
        per_token=[1000 * answer.per_token for answer in taken],
        between_tokens=Percentiles.of([gap for answer in taken for gap in answer.gaps]),
        mean_acceptance_length=total.mean_acceptance_length,
        acceptance_rate=total.acceptance_rate,
        per_position_rates=total.per_position_rates,
        acceptance_histogram=total.histogram,
    )


def _summary(texts: list[PromptResult], taken: list[list[Answer]], plain: list[list[Answer]]) -> Summary:
    """Of one mode on one workload, from its texts and from their answers in each round, and plain decoding's."""
    everything = [answer for each in taken for answer in each]
    total = _total(everything)
    predicted = [text.predicted_speedup for text in texts if text.predicted_speedup is not None]
    return Summary(
        workload=texts[0].workload,
        mode=texts[0].mode,
        prompts=len(texts),
        tokens=sum(text.tokens for text in texts),
        tokens_per_second=[geometric_mean(of_round) for of_round in zip(*(t.tokens_per_second for t in texts), strict=True)],
        speedup=[geometric_mean(of_round) for of_round in zip(*(text.speedup for text in texts), strict=True)],
        predicted_speedup=geometric_mean(predicted) if predicted else None,
        first_token=Percentiles.of([answer.arrivals[0][0] for answer in everything]),
        per_token=Percentiles.of([answer.per_token for answer in everything if len(answer.arrivals) > 1]),
        between_tokens=Percentiles.of([gap for answer in everything for gap in answer.gaps]),
        mean_acceptance_length=total.mean_acceptance_length,
        acceptance_rate=total.acceptance_rate,
        per_position_rates=total.per_position_rates,
        acceptance_histogram=total.histogram,
        rounds_by_drafter=total.rounds_by_drafter,
        drafting_rounds=total.drafting_rounds,
        rounds=total.rounds,
        outside_engines=total.outside_engines,
        same_text=sum(
            a.tokens == p.tokens for each, before in zip(taken, plain, strict=True) for a, p in zip(each, before, strict=True)
        ),
    )


def trace(loaded: Outrider, workload: str, prompt: list[int], tokens: list[int], most: int = 0) -> Trace:
    """Return the record of a text of at most `most` tokens, with what the first drafter on the device would have proposed."""
    drafter = next((each for each in loaded.decoder.drafters.values() if isinstance(each, DeviceDrafter)), None)
    agrees, confidences = drafter.agreement(prompt, tokens) if drafter is not None else ([], [])
    return Trace(workload, prompt, tokens, agrees, confidences, most)


def _part(mode: Mode, costs: Costs, end: int, taken: list[Answer]) -> Part:
    k = int(mode.k)
    total = _total(taken)
    engines = {
        "draft": drafters.get(mode.drafter).cost(costs, k, end, True) if k else 0.0,
        "target": costs.step("target", k + 1, end),
        "verifier": costs.sampler("greedy_verifier", k + 1),
    }
    outside = sum(engines.values()) * total.outside_engines / (1 - total.outside_engines)
    return Part(mode=mode, **engines, outside_engines=outside)


def machine(device: Device) -> str:
    """The processor, as far as the system tells, the cores this process may use, and the GPU if that is the device."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{names[0] if names else platform.processor() or platform.machine()}, {cores} cores"
    return found if device.synchronous else f"{found}, {device.name}"
