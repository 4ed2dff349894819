"""`outrider train-draft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from outrider.commands.output import print_json, progress_bar
from outrider.engines.precisions import PRECISIONS
from outrider.training.arguments import DEFAULTS, KINDS, LEARNING_RATE, TrainingArguments


@click.command("train-draft")
@click.option("--target", required=True, metavar="SOURCE", help="The model to draft for: a Hugging Face folder or a hub id.")
@click.option("--kind", required=True, type=click.Choice(KINDS), help="An EAGLE-3 head, or a parallel draft.")
@click.option(
    "--text",
    "texts",
    required=True,
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Prompts for the target: JSON lines with messages, prompt or text (.jsonl, .jsonl.gz), or a plain text file. May be"
    " repeated.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write; it must not exist.")
@click.option(
    "--from",
    "start",
    metavar="SOURCE",
    help="Checkpoint to start from. For eagle3, a published head; for pard (required), a small model or a parallel draft.",
)
@click.option(
    "--bundle", type=click.Path(path_type=Path), help="A bundle of the target that writes the answers.  [default: build one]"
)
@click.option("--given", is_flag=True, help="Train on the answers in the texts instead of the target's own.")
@click.option(
    "--temperature",
    type=float,
    default=DEFAULTS["temperature"],
    show_default=True,
    help="Sampling temperature of the target's answers.",
)
@click.option(
    "--max-new-tokens", type=int, default=DEFAULTS["max_new_tokens"], show_default=True, help="Maximum tokens per answer."
)
@click.option(
    "--max-length", type=int, default=DEFAULTS["max_length"], show_default=True, help="Maximum tokens of prompt and answer."
)
@click.option("--epochs", type=float, default=DEFAULTS["epochs"], show_default=True, help="Passes over all answers.")
@click.option("--batch", type=int, default=DEFAULTS["batch"], show_default=True, help="Answers per batch.")
@click.option("--accumulate", type=int, default=DEFAULTS["accumulate"], show_default=True, help="Batches per optimizer step.")
@click.option(
    "--learning-rate",
    type=float,
    help=f"Peak learning rate.  [default: {', '.join(f'{rate} for {kind}' for kind, rate in LEARNING_RATE.items())}]",
)
@click.option(
    "--draft-vocab",
    type=int,
    default=DEFAULTS["draft_vocab"],
    show_default=True,
    help="Number of tokens that a new head may propose: the most frequent ones of the answers.",
)
@click.option(
    "--k", type=int, default=DEFAULTS["k"], show_default=True, help="Tokens that the draft learns to propose per round."
)
@click.option(
    "--precision",
    type=click.Choice(list(PRECISIONS)),
    default=DEFAULTS["precision"],
    show_default=True,
    help="Precision of the target, for its answers and for the final check of the draft.",
)
@click.option("--seed", type=int, default=DEFAULTS["seed"], show_default=True, help="Random seed.")
@click.option("--json", "as_json", is_flag=True, help="Print the report on standard output.")
def command(target: str, kind: str, texts: tuple[Path, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Train a draft on a target's own answers, and check that it accepts as many tokens when served as in training.

    To resume an interrupted run, repeat the command.
    """
    arguments = TrainingArguments.check(target, kind, list(texts), output, **options)
    with progress_bar() as progress:
        progress.stage("importing torch and transformers")
        from outrider.training.train import train_draft

        report = train_draft(arguments, progress)
    if as_json:
        print_json(msgspec.json.encode(report.as_dict()))
        return
    served, trained = report.served.mean_acceptance_length, report.trained.mean_acceptance_length
    click.echo(f"trained {report.parameters:,} parameters on {report.tokens:,} tokens of {report.examples:,} answers")
    click.echo(
        f"mean acceptance length on held-out prompts: {served:.2f} served with k = {options['k']}, {trained:.2f} in PyTorch"
    )
    click.echo(f"wrote {output}")
