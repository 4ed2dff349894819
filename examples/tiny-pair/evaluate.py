#!/usr/bin/env python3
"""Measure the acceptance of the shipped pair by workload, on the beginnings of held-out documents.

Prints the table of the model card:

make demo && .venv/bin/python examples/tiny-pair/evaluate.py build/demo/bundle
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from outrider import Outrider, SamplingParams
from outrider.runtime.stats import Stats

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    outrider = Outrider.load(options.bundle)
    found: dict[str, list[Stats]] = defaultdict(list)
    for line in (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        *_, last = outrider.generate(prompt["prompt"], SamplingParams(max_new_tokens=options.tokens), k=options.k)
        found[prompt["workload"]].append(last.stats)
    print(f"| workload | prompts | tokens | mean acceptance length, k = {options.k} | acceptance rate | by position |")
    print("|---|---|---|---|---|---|")
    for workload, runs in found.items():
        total = Stats()
        for run in runs:
            total.add(run)
        rates = " ".join(f"{rate:.2f}" for rate in total.per_position_rates)
        print(
            f"| {workload} | {len(runs)} | {total.emitted:,} | {total.mean_acceptance_length:.2f} |"
            f" {total.acceptance_rate:.2f} | {rates} |"
        )


if __name__ == "__main__":
    main()
