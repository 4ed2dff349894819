"""`outrider export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.bundle.manifest import CHAT_TEMPLATE
from outrider.commands.options import LORA, NO_TEMPLATE, chat_template
from outrider.commands.output import print_json, printable, progress_bar
from outrider.engines.precisions import PRECISIONS
from outrider.export.arguments import ExportArguments
from outrider.export.garbage import exporter, without_garbage_collection
from outrider.export.weights.rounding import AS_IS

if TYPE_CHECKING:
    from outrider.bundle.manifest import Model


@click.command("export")
@click.option(
    "--target", required=True, metavar="SOURCE", help="The large model: a Hugging Face folder, a hub id, or a GGUF file."
)
@click.option(
    "--draft",
    "drafts",
    metavar="SOURCE",
    multiple=True,
    help="The draft: a small model with the same vocabulary, a parallel draft (PARD), a draft head for this target (EAGLE-3,"
    " P-EAGLE, DFlash, DSpark), or 'mtp' for the head in the target's own checkpoint. May be repeated, once for each of these"
    " three kinds. With 'none', only n-grams of the text draft.  [default: the target's own head, if it has one]",
)
@click.option("--lora", **LORA)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write; it must not exist.")
@click.option(
    "--precision",
    type=click.Choice([*PRECISIONS, AS_IS]),
    help=f"Precision of the weights; with {AS_IS}, the integers of a quantized checkpoint are kept.  [default: {AS_IS} if"
    " that is as fast as int4, otherwise fp32]",
)
@click.option(
    "--head-precision",
    type=click.Choice(["fp32", "int8", "int4"]),
    help=f"Precision of the output head, if --precision is int8 or int4; with {AS_IS}, of everything that cannot be kept."
    "  [default: int8; for the draft, as --precision]",
)
@click.option(
    "--method",
    type=click.Choice(["rtn", "auto-round"]),
    help="How to round weights: to nearest, or tuned on the --calibration text (int4 only; slow).  [default: rtn]",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Text file similar to what the pair will read and write, for --method auto-round.",
)
@click.option(
    "--group-size",
    type=click.Choice([32, 64, 128]),
    help="Maximum number of weights that share a scale, if --precision is int8 or int4."
    "  [default: for the target 32 with int4 and 64 with int8; for the draft 128]",
)
@click.option(
    "--draft-vocab",
    type=int,
    metavar="N",
    help="Let the draft propose only the N most frequent tokens of --draft-vocab-text: faster, at some loss of acceptance.",
)
@click.option("--draft-vocab-text", metavar="FILE", type=click.Path(path_type=Path), help="Text file in which to count tokens.")
@chat_template
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(
    target: str,
    drafts: tuple[str, ...],
    lora: tuple[str, ...],
    output: Path,
    precision: str | None,
    head_precision: str | None,
    method: str | None,
    calibration: Path | None,
    group_size: int | None,
    draft_vocab: int | None,
    draft_vocab_text: Path | None,
    chat_template: str | None,
    as_json: bool,
) -> None:
    """Export a pair of checkpoints, or a target alone, as standard ONNX, and check each graph against its checkpoint."""
    arguments = ExportArguments.check(  # before the slow imports
        target,
        drafts,
        output,
        precision=precision,
        head_precision=head_precision,
        method=method,
        calibration=calibration,
        group_size=group_size,
        draft_vocab=draft_vocab,
        draft_vocab_text=draft_vocab_text,
        chat_template=chat_template,
        lora=lora,
    )
    with progress_bar() as progress, without_garbage_collection():
        manifest = exporter(progress)(arguments, progress)
    if as_json:
        print_json(manifest.encode())
        return
    for role, model in manifest.models.items():
        _print_model(role, model)
    if CHAT_TEMPLATE not in manifest.files:
        click.echo(NO_TEMPLATE)
    click.echo(f"wrote {output}")


def _print_model(role: str, model: Model) -> None:
    parity, quantization = model.parity, model.quantization
    head = f" (head {quantization.head_precision})" if quantization else ""
    click.echo(
        f"{role}: {model.architecture}, {model.parameters:,} parameters, {model.precision}{head}; logits within"
        f" {parity.max_abs_diff:.1e} of the checkpoint's (tolerance {parity.tolerance:.1e}),"
        f" same argmax in {parity.argmax_agreement:.0%} of {parity.rows} rows"
    )
    if model.adapters:
        click.echo(printable(f"{role}: merged {model.merged}"))
    if model.head_tokens is not None:
        click.echo(f"{role}: proposes {model.head_tokens:,} of {model.vocab_rows:,} tokens")
    if quantization is None:
        return
    if parity.perplexity is not None:
        click.echo(
            f"{role}: perplexity {parity.perplexity:.4g} on held-out text, against {parity.reference_perplexity:.4g} in fp32"
        )
    if parity.unrounded_perplexity is not None:
        rounded = quantization.rounded
        what = f"; rounded to {quantization.head_precision}: {len(rounded)}, the first is {rounded[0]}" if rounded else ""
        click.echo(f"{role}: perplexity {parity.unrounded_perplexity:.4g} of the kept weights with fp32 activations{what}")
    if quantization.kept:
        click.echo(
            f"{role}: {sum(quantization.kept.values()):,} weights stay in fp32 (outside linear layers, in layers whose inputs"
            f" are not two or more blocks of 32, or as requested); the first is {next(iter(quantization.kept))}"
        )
