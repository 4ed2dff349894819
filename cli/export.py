"""`outrider export`."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.cli.show import progress_bar


@click.command("export")
@click.option(
    "--target", required=True, metavar="SOURCE", help="The big model: a Hugging Face folder, a hub id, or a GGUF file."
)
@click.option("--draft", required=True, metavar="SOURCE", help="The small model, of the same vocabulary.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to write; it must not exist.")
@click.option("--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest on standard output.")
def command(target: str, draft: str, output: Path, precision: str, as_json: bool) -> None:
    """Export a checkpoint pair as standard ONNX, each graph checked against its checkpoint."""
    from outrider.export.pair import export_pair

    with progress_bar() as progress:
        manifest = export_pair(target, draft, output, precision=precision, progress=progress)
    if as_json:
        click.echo(manifest.encode().decode(), nl=False)
        return
    for role, model in manifest.models.items():
        click.echo(
            f"{role}: {model.architecture}, {model.parameters:,} parameters, {precision}; logits within"
            f" {model.parity.max_abs_diff:.1e} of the checkpoint (allowed {model.parity.tolerance:.1e}),"
            f" same argmax in {model.parity.argmax_agreement:.0%} of {model.parity.rows} rows"
        )
    click.echo(f"wrote {output}")
