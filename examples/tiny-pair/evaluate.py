#!/usr/bin/env python3
"""Measure the acceptance of the drafters of a bundle of the shipped pair by workload, on the beginnings of held-out documents.

Prints the table of the model card, for which README.md has the commands:

    .venv/bin/python examples/tiny-pair/evaluate.py BUNDLE
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outrider import Outrider, SamplingParams
from outrider.runtime import drafters
from outrider.runtime.drafters.ngram import NgramDrafter
from outrider.runtime.stats import Stats

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    outrider = Outrider.load(options.bundle)
    prompts = [json.loads(line) for line in (HERE / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    params = SamplingParams(max_new_tokens=options.tokens)
    length = f"mean acceptance length, k = {options.k}"
    print(f"| workload | drafter | prompts | tokens | {length} | acceptance rate | by position |")
    print("|---|---|---|---|---|---|---|")
    for workload in dict.fromkeys(prompt["workload"] for prompt in prompts):
        texts = [prompt["prompt"] for prompt in prompts if prompt["workload"] == workload]
        for name in (each for each in outrider.drafters if each != NgramDrafter.name):
            total = Stats()
            for text in texts:
                *_, last = outrider.generate(text, params, k=options.k, drafter=name)
                total.add(last.stats)
            rates = " ".join(f"{rate:.2f}" for rate in total.per_position_rates)
            print(
                f"| {workload} | {drafters.get(name).label} | {len(texts)} | {total.emitted:,} |"
                f" {total.mean_acceptance_length:.2f} | {total.acceptance_rate:.2f} | {rates} |"
            )


if __name__ == "__main__":
    main()
