#!/usr/bin/env python3
"""Write prompts to train drafts for Qwen2.5-Coder-1.5B-Instruct on: questions of GSM8K, tasks of MBPP, and requests to support.

    python examples/qwen2.5-coder-1.5b/prompts.py --corpora DIR --held-out FILE... -o prompts.jsonl

DIR is that of `examples/tiny-pair/train.py`. What is asked in a FILE, JSON lines with `prompt`, is left out, however it is
worded around it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path


def questions(text: str) -> Iterator[str]:
    """Yield the question of a problem of GSM8K."""
    if found := re.match(r"Question: (.*?)\nAnswer:", text, re.DOTALL):
        yield found[1]


def tasks(text: str) -> Iterator[str]:
    """Yield the task of a problem of MBPP."""
    if found := re.match(r'"""(.*?)"""', text, re.DOTALL):
        yield f"{found[1]} Write it in Python."


def requests(text: str) -> Iterator[str]:
    """Yield what a customer says first."""
    if found := re.match(r"Customer: (.*?)\n", text):
        yield found[1]


PROMPTS = {"math": questions, "code": tasks, "support": requests}


def words(text: str) -> str:
    """Return the words of a text, for comparison."""
    return " ".join(re.findall(r"\w+", text.lower())).removesuffix(" write it in python")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--each", type=int, default=800, help="prompts of each kind")
    options = parser.parse_args()
    held = [
        words(json.loads(line)["prompt"]) for file in options.held_out for line in file.read_text(encoding="utf-8").splitlines()
    ]
    chosen = []
    for kind, read in PROMPTS.items():
        with gzip.open(options.corpora / f"{kind}.jsonl.gz", "rt", encoding="utf-8") as lines:
            found = {words(prompt): prompt for line in lines for prompt in read(json.loads(line)["text"])}
        kept = [prompt for own, prompt in found.items() if not any(own in other or other in own for other in held)]
        print(f"{kind}: {len(found):,} prompts, {len(found) - len(kept)} of them held out")
        chosen += [(kind, prompt) for prompt in random.Random(0).sample(kept, min(options.each, len(kept)))]
    random.Random(1).shuffle(chosen)
    with open(options.output, "w", encoding="utf-8") as file:
        for kind, prompt in chosen:
            file.write(json.dumps({"workload": kind, "prompt": prompt}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
