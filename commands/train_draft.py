"""`outrider train-draft`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from outrider.commands.options import LORA
from outrider.commands.output import print_json, progress_bar
from outrider.engines.precisions import PRECISIONS
from outrider.export.interrupts import kept_interrupts
from outrider.training.arguments import DEFAULTS, KINDS, LEARNING_RATE, TrainingArguments


def setting(name: str, kind: Any, meaning: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an option for one of `DEFAULTS`."""
    return click.option(f"--{name}", type=kind, default=dict(DEFAULTS)[name.replace("-", "_")], show_default=True, help=meaning)


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
@click.option("--lora", **LORA)
@click.option("--given", is_flag=True, help="Train on the answers in the texts instead of the target's own.")
@setting("temperature", float, "Sampling temperature of the target's answers.")
@setting("max-new-tokens", int, "Maximum tokens per answer.")
@setting("max-length", int, "Maximum tokens of prompt and answer.")
@setting("epochs", float, "Passes over all answers.")
@setting("batch", int, "Answers per batch.")
@setting("accumulate", int, "Batches per optimizer step.")
@click.option(
    "--learning-rate",
    type=float,
    help=f"Peak learning rate.  [default: {', '.join(f'{rate} for {kind}' for kind, rate in LEARNING_RATE.items())}]",
)
@setting("draft-vocab", int, "Number of tokens that a new head may propose: the most frequent ones of the answers.")
@setting("k", int, "Tokens that the draft learns to propose per round.")
@setting(
    "precision",
    click.Choice(list(PRECISIONS)),
    "Precision of the target, for its answers and for the final check of the draft.",
)
@setting("seed", int, "Random seed.")
@click.option("--json", "as_json", is_flag=True, help="Print the report on standard output.")
def command(target: str, kind: str, texts: tuple[Path, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Train a draft on a target's own answers, and check that it accepts as many tokens when served as in training.

    To resume an interrupted run, repeat the command.
    """
    arguments = TrainingArguments.check(target, kind, list(texts), output, **options)
    with progress_bar() as progress:
        progress.stage("importing torch and transformers")
        with kept_interrupts():
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
