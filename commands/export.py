"""`outrider export`."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.commands.output import progress_bar


@click.command("export")
@click.option(
    "--target", required=True, metavar="SOURCE", help="The big model: a Hugging Face folder, a hub id, or a GGUF file."
)
@click.option(
    "--draft", metavar="SOURCE", help="The small model, of the same vocabulary. Without it, drafts come from the text alone."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write; it must not exist.")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16", "int8", "int4"]), default="fp32", show_default=True)
@click.option(
    "--head-precision",
    type=click.Choice(["fp32", "int8", "int4"]),
    help="What the weights that give the logits get, where --precision is int8 or int4.  [default: int8; the draft's as all]",
)
@click.option(
    "--method",
    type=click.Choice(["rtn", "auto-round"]),
    help="How weights are rounded: to the nearest, or tuned on --calibration (int4; slow).  [default: rtn]",
)
@click.option("--calibration", type=click.Path(path_type=Path), help="A text file like what the pair will read and write.")
@click.option(
    "--draft-vocab",
    type=int,
    metavar="N",
    help="The draft proposes only the N tokens that --draft-vocab-text has most: a faster draft, and some acceptance less.",
)
@click.option("--draft-vocab-text", metavar="FILE", type=click.Path(path_type=Path), help="A text to count tokens in.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(
    target: str,
    draft: str | None,
    output: Path,
    precision: str,
    head_precision: str | None,
    method: str | None,
    calibration: Path | None,
    draft_vocab: int | None,
    draft_vocab_text: Path | None,
    as_json: bool,
) -> None:
    """Export a checkpoint pair, or a target alone, as standard ONNX, each graph checked against its checkpoint."""
    from outrider.export.pair import export_pair

    with progress_bar() as progress:
        manifest = export_pair(
            target,
            draft,
            output,
            precision=precision,
            head_precision=head_precision,
            method=method,
            calibration=calibration,
            draft_vocab=draft_vocab,
            draft_vocab_text=draft_vocab_text,
            progress=progress,
        )
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
        return
    for role, model in manifest.models.items():
        parity, rounded = model.parity, model.quantization
        head = f" (head {rounded.head_precision})" if rounded else ""
        click.echo(
            f"{role}: {model.architecture}, {model.parameters:,} parameters, {precision}{head}; logits within"
            f" {parity.max_abs_diff:.1e} of the checkpoint (allowed {parity.tolerance:.1e}),"
            f" same argmax in {parity.argmax_agreement:.0%} of {parity.rows} rows"
        )
        if model.head_tokens is not None:
            click.echo(f"{role}: proposes {model.head_tokens:,} of {model.vocab_rows:,} tokens")
        if rounded is None:
            continue
        click.echo(f"{role}: perplexity {parity.perplexity:.4g} on held-out text, {parity.reference_perplexity:.4g} in fp32")
        if rounded.kept:
            click.echo(
                f"{role}: {sum(rounded.kept.values()):,} weights stay in fp32: in no linear layer, with a number of inputs"
                f" that is not two or more blocks of 32, or as asked; the first are {next(iter(rounded.kept))}"
            )
    click.echo(f"wrote {output}")
