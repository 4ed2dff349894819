"""Compare Outrider on a CPU with ONNX Runtime GenAI, OpenVINO GenAI, llama.cpp and transformers.

    .venv/bin/python -m pip install onnxruntime-genai openvino-genai
    .venv/bin/python -m outrider.experiments.compare_cpu T.gguf D.gguf PROMPTS.jsonl --work DIR --output docs/cpu

T and D are GGUF files of a target and its draft. llama.cpp runs these files. For the other programs they are converted once,
into DIR; delete DIR to convert them again. A program that is not installed is left out, and the report says so. llama.cpp needs
`llama-server` in the PATH. PROMPTS has one `{"workload", "prompt"}` object per line. Writes OUTPUT.json and OUTPUT.md.

Decoding is greedy, and every answer has the same number of tokens. Each program runs in a separate process, which answers all
prompts at each k and then exits, so that its peak memory can be measured. In every round the programs run one after the other,
and each round starts with a different program. Before the first round, a tuning round selects the fastest settings of each
program, for plain and speculative decoding. If a run is stopped, the same command resumes it from OUTPUT.unfinished.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from outrider.experiments.compare_cpu.common import THREADS, Job, K, PairFiles
from outrider.experiments.compare_cpu.measuring import Contestant, Journal, measure, tune
from outrider.experiments.compare_cpu.peers import PEERS, PROGRAMS, ours
from outrider.experiments.compare_cpu.report import write_report

PromptLine = dict[str, str]


def main() -> int:
    """Prepare the models, measure all programs in rounds, and write the report."""
    options = _parse()
    from outrider.bench.measure import machine
    from outrider.engines.device import Cpu

    versions = {name: version for name, program in PROGRAMS.items() if (version := program.version())}
    peers = [name for name in PEERS if name in versions]
    jobs = prepare(options.work, PairFiles(options.target, options.draft), options.variant, peers)
    prompts = choose_prompts(options.prompts, options.each)
    ids = ours.encode(jobs[f"{ours.NAME} {options.variant[0]}"], [prompt["prompt"] for prompt in prompts])
    setup = {"machine": machine(Cpu()), "versions": versions}
    journal = Journal(Path(f"{options.output}.unfinished.jsonl"), setup)
    contestants = [
        Contestant(name, ours.NAME, f"{THREADS} threads", jobs[name] | {"k": [0, *K, ours.AUTO]})
        for name in (f"{ours.NAME} {variant}" for variant in options.variant)
    ]
    for peer in peers:
        contestants += tune(journal, peer, jobs[peer], ids, options.tokens // 2)
    result = {
        "about": options.about,
        "command": " ".join(["python -m outrider.experiments.compare_cpu", *sys.argv[1:]]),
        "date": str(datetime.date.today()),
        **setup,
        "weights_of": {name: PEERS[name].WEIGHTS for name in peers},
        "missing": [name for name in PEERS if name not in peers],
        "workloads": [prompt["workload"] for prompt in prompts],
        "tokens": options.tokens,
        "prompt_tokens": [len(each) for each in ids],
        "weights": {name: weight_bytes(job) for name, job in jobs.items()},
        "results": measure_rounds(journal, contestants, ids, options.tokens, options.rounds),
    }
    Path(f"{options.output}.json").write_text(json.dumps(result), encoding="utf-8")
    write_report(options.output, result)
    journal.path.unlink()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the converted models, several GiB")
    parser.add_argument("--output", type=Path, required=True, help="the files to write, without their suffix")
    parser.add_argument(
        "--variant",
        nargs="+",
        choices=ours.VARIANTS,
        default=["int4"],
        help="variants of Outrider: backend, precision and group size; all ratios are to the first one",
    )
    parser.add_argument("--each", type=int, default=2, help="prompts per workload, from the shortest to the longest")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens per answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--about", default="", help="a description of the models and prompts, for the top of the report")
    return parser.parse_args()


def prepare(work: Path, pair: PairFiles, variants: list[str], peers: list[str]) -> dict[str, Job]:
    """Convert the models for all programs into `work`. Return the jobs by name, without settings."""
    folder = work / f"{pair.target.stem} {pair.draft.stem}"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = {f"{ours.NAME} {variant}": ours.prepare(folder, pair, variant) for variant in variants}
    return jobs | {name: PEERS[name].prepare(folder, pair) for name in peers}


def choose_prompts(path: Path, count: int) -> list[PromptLine]:
    """Return `count` prompts of every workload, spread from the shortest to the longest; a single one has medium length."""
    prompts: dict[str, list[PromptLine]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        prompts[prompt["workload"]].append(prompt)
    chosen = []
    for own in prompts.values():
        own.sort(key=lambda prompt: len(prompt["prompt"]))
        last = len(own) - 1
        places = [at * last // (count - 1) for at in range(count)] if count > 1 else [last // 2]
        chosen += [own[at] for at in dict.fromkeys(places)]
    return chosen


def weight_bytes(job: Job) -> int:
    """Return the size of both models' weights on disk, in bytes."""
    if "bundle" in job:
        return sum(file.stat().st_size for file in Path(job["bundle"]).glob("*/model.onnx.data"))
    if "folder" in job:
        files = [file for role in PairFiles._fields for file in (Path(job["folder"]) / role).iterdir()]
        return sum(file.stat().st_size for file in files if file.suffix in (".bin", ".data", ".safetensors"))
    return sum(Path(job[role]).stat().st_size for role in PairFiles._fields)


def measure_rounds(
    journal: Journal, contestants: list[Contestant], prompts: list[list[int]], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Run all contestants in each round, starting with a different one each time. Return the results of each at each k."""
    results: dict[tuple[str, str, Any], dict[str, Any]] = {}
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            runs, peak = measure(journal, contestant, prompts, tokens)
            name, settings = contestant.name, contestant.settings
            for k, own in runs.items():
                new = {"name": name, "settings": settings, "k": k, "rounds": [], "peak": 0}
                entry = results.setdefault((name, settings, k), new)
                entry["rounds"].append([run._asdict() for run in own])
                entry["peak"] = max(peak, entry["peak"])
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return list(results.values())


if __name__ == "__main__":
    sys.exit(main())
