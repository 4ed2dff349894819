"""Test a server under load on this machine, and check that every answer is the same as without load.

    python -m outrider.experiments.load_test BUNDLE --output OUTPUT

Starts `outrider serve` on the bundle. Some clients disconnect in the middle of an answer, and some read slowly. All other
answers must equal those of plain decoding, and the server's memory must not grow.

With --hostile, four good clients send the same requests, alone and next to hostile clients: prompts of a megabyte back to back,
a hundred idle connections, API keys that request all slots, and slow grammars. With --schemas, requests have that number of
distinct schemas; the report has the server's memory after each tenth of them. With --compare, one server runs with k = auto and
one with k = 0 (plain decoding), and both get the same requests, with each number of clients.

Prints a report. The exit code is 1 if something is wrong. With --output it also writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from outrider.bench.measure import machine
from outrider.engines.device import Cpu
from outrider.errors import OutriderError
from outrider.experiments.load_test.clients import SEEDS, Case, cases, figures, load, wrong_answers
from outrider.experiments.load_test.hostile import KINDS, Hostile
from outrider.experiments.load_test.report import markdown
from outrider.experiments.load_test.server import Server

# Limit for the memory at the end divided by the memory in the middle. Launches are prepared once per shape and slot and kept,
# up to a limit that 1,000 requests do not reach. Use more requests to find a leak (--requests 4000).
MAX_GROWTH = 1.1
GOOD = 4  # good clients next to hostile ones: they leave slots free for the greedy client


def main() -> int:
    """Run the tests that the command line asks for, and write the report. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=positive, default=1000)
    parser.add_argument("--clients", type=positive, default=32)
    parser.add_argument("--hostile", action="store_true", help="also send the requests next to hostile clients")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="kinds of hostile clients; all by default")
    parser.add_argument(
        "--schemas", type=positive, metavar="COUNT", help="also send requests with this number of distinct schemas"
    )
    parser.add_argument("--compare", type=counts, metavar="CLIENTS", help="compare k = auto with plain decoding: 1,4,16,32")
    parser.add_argument("--greedy", action="store_true", help="leave out the sampled requests, two thirds of all")
    parser.add_argument("--workload", type=Path, help="JSON Lines: send the first prompt of each workload, as a chat")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of --compare")
    parser.add_argument("--output", type=Path, help="the files to write, without their suffix")
    options = parser.parse_args()
    known = cases(options.bundle, (None,) if options.greedy else SEEDS, options.workload)
    chance = random.Random(0)
    requests = [chance.choice(known) for _ in range(options.requests)]
    report: dict[str, Any] = {"machine": machine(Cpu()), "date": str(datetime.date.today())}
    report["soak"] = soak(options.bundle, requests, options.clients)
    wrong = list(report["soak"]["wrong"])
    if options.hostile:
        groups = [(), *((kind,) for kind in options.kinds), tuple(options.kinds)]
        report["hostile"] = [with_hostile_clients(options.bundle, requests, kinds) for kinds in groups]
        wrong += [each for row in report["hostile"] for each in row["wrong"]]
    if options.schemas:
        report["schemas"] = schemas(options.bundle, options.schemas)
    if options.compare:
        report["compare"] = compare(options.bundle, known, options.rounds, options.compare)
    print(json.dumps(report, indent=1))
    if options.output is not None:
        options.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        command = " ".join(["python -m outrider.experiments.load_test", *sys.argv[1:]])
        options.output.with_suffix(".md").write_text(markdown(report, command))
    return 1 if wrong else 0


def positive(text: str) -> int:
    """Parse a number of at least 1; argparse reports the error."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def counts(text: str) -> list[int]:
    """Parse positive numbers separated by commas."""
    return [positive(each) for each in text.split(",")]


def soak(bundle: Path, requests: list[Case], clients: int) -> dict[str, Any]:
    """Send all requests to a server. Return the figures, and descriptions of what is wrong."""
    server = Server(bundle)
    try:
        answers, seconds, memory = load(server, requests, clients, faults=True)
        wrong = wrong_answers(requests, answers)
        time.sleep(1)
        counters = server.counters()
        finished = sum(value for name, value in counters.items() if name.startswith("outrider_requests_total"))
        if finished != len(requests):
            wrong.append(f"{finished:g} requests of {len(requests)} finished")
        if any(counters[f"outrider_{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage")):
            wrong.append("a slot is still in use")
        growth = memory[-1] / memory[len(memory) // 2]
        if growth > MAX_GROWTH:
            wrong.append(f"memory grew by a factor of {growth:.2f} from the middle to the end")
    finally:
        server.stop()
    return {
        "wrong": wrong,
        "clients": clients,
        "disconnected": sum(answer.disconnected for answer in answers),
        "memory": {"first": memory[0], "middle": memory[len(memory) // 2], "last": memory[-1]},
        **figures(answers, seconds),
    }


def with_hostile_clients(bundle: Path, requests: list[Case], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Send all requests from a few good clients, next to these kinds of hostile clients."""
    server = Server(bundle)
    try:
        load(server, requests[:50], GOOD, faults=False)  # warm up
        hostile = Hostile(server, kinds)
        with hostile.running():
            answers, seconds, memory = load(server, requests, GOOD, faults=False)
    finally:
        server.stop()
    return {
        "kinds": ", ".join(kinds) or "none",
        "wrong": wrong_answers(requests, answers),
        "clients": GOOD,
        "memory": {"first": memory[0], "last": memory[-1]},
        "logged": server.logged,
        "replies": dict(hostile.replies),
        **figures(answers, seconds),
    }


def schemas(bundle: Path, count: int) -> dict[str, Any]:
    """Send requests with distinct schemas in ten parts. Return the server's memory after each part, and the replies."""
    server = Server(bundle)
    try:
        hostile, memory = Hostile(server, ()), []
        for _ in range(10):
            hostile.post_schemas(count // 10)
            memory.append(server.memory)
    finally:
        server.stop()
    return {"memory": memory, "replies": dict(hostile.replies)}


def compare(bundle: Path, known: list[Case], rounds: int, loads: list[int]) -> list[dict[str, Any]]:
    """Compare k = auto with plain decoding. Both servers run all the time and take turns; an idle server takes no time. Rounds
    repeat their requests, so neither server remembers earlier ones."""
    servers = {"auto": Server(bundle, "--memory-tokens", "0"), "plain": Server(bundle, "--k", "0")}
    rows = []
    try:
        for clients in loads:
            count = max(16, 3 * clients)
            requests = random.Random(clients).sample(known * (1 + count // len(known)), count)
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
            for number in range(rounds):
                for name in sorted(servers, reverse=number % 2 == 1):
                    runs[name].append(figures(*load(servers[name], requests, clients, faults=False)[:2]))
            speeds = {name: [each["tokens_per_second"] for each in own] for name, own in runs.items()}
            ratios = [a / b for a, b in zip(speeds["auto"], speeds["plain"], strict=True)]
            rows.append({"clients": clients, "requests": len(requests), "ratios": ratios, **runs})
    finally:
        for server in servers.values():
            server.stop()
    return rows


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OutriderError as error:
        sys.exit(f"error: {error}\nhint:  {error.hint}")
