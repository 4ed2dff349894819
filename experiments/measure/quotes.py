"""Let a bundle answer prompts greedily, and print how much of its answers is quoted, as a Markdown table.

A token is quoted if it is in a run of four tokens that the text before has, too: the answer's own prompt, or an earlier
prompt or answer of the same workload. The answers are added to the prompts in OUTPUT.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from outrider import Outrider, SamplingParams
from outrider.experiments.measure.arguments import FILE, FOLDER

RUN = 4  # tokens

Runs = set[tuple[int, ...]]


def runs(tokens: list[int]) -> Runs:
    """Return all runs of `RUN` tokens."""
    return {tuple(tokens[at : at + RUN]) for at in range(len(tokens) - RUN + 1)}


def quoted(tokens: list[int], known: Runs) -> int:
    """Return how many of the tokens are in a known run."""
    found = {at + step for at in range(len(tokens) - RUN + 1) if tuple(tokens[at : at + RUN]) in known for step in range(RUN)}
    return len(found)


@click.command(help=__doc__)
@click.argument("bundle", type=FOLDER)
@click.argument("prompts", type=FILE)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option("--chat", is_flag=True, help="Apply the bundle's chat template to the prompts.")
def command(bundle: Path, prompts: Path, output: Path, max_new_tokens: int, chat: bool) -> None:
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    totals: dict[str, list[int]] = {}
    before: dict[str, Runs] = {}
    with Outrider.load(bundle) as outrider:
        for line in lines:
            prompt = outrider.text.encode(line["prompt"], chat=chat)
            *_, last = events = list(outrider.generate(prompt, SamplingParams(max_new_tokens=max_new_tokens)))
            assert last.finish_reason
            answer = [token for event in events for token in event.token_ids]
            line["answer"] = "".join(event.text for event in events)
            own, earlier = runs(prompt), before.setdefault(line["workload"], set())
            added = len(prompt), len(answer), quoted(answer, own), quoted(answer, own | earlier)
            totals[line["workload"]] = [sum(pair) for pair in zip(totals.get(line["workload"], [0] * 4), added, strict=True)]
            earlier |= own | runs(prompt + answer)
    print("| workload | prompts | tokens of a prompt | of an answer | quoted from the prompt | from it and earlier requests |")
    print("|---|---|---|---|---|---|")
    for workload, (read, written, own_share, share) in totals.items():
        count = sum(line["workload"] == workload for line in lines)
        shares = f"{own_share / written:.0%} | {share / written:.0%}"
        print(f"| {workload} | {count} | {read / count:.0f} | {written / count:.0f} | {shares} |")
    output.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
