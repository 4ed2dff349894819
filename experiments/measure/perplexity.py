"""Compare the perplexity of bundles as they are served, and print a Markdown table.

`outrider export` measures the exported graph. This runs a bundle's own engines, including the rounding that their backend adds.
It reads the export's held-out text in pieces as long as the capacity. The perplexity is exp of the mean of -log p over all
tokens except the first of each piece.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
from tokenizers import Tokenizer

from outrider.backends.open import open_bundle, open_engines
from outrider.bundle.manifest import TOKENIZER
from outrider.experiments.measure.arguments import FOLDER
from outrider.export.heldout import TEXT


@click.command(help=__doc__)
@click.argument("bundles", type=FOLDER, nargs=-1, required=True, metavar="BUNDLE...")
def command(bundles: tuple[Path, ...]) -> None:
    print("| bundle | backend | block | model | tokens | perplexity |\n|---|---|---|---|---|---|")
    for bundle in bundles:
        manifest, build = open_bundle(bundle)
        engines = open_engines(bundle, manifest, build)
        encoder = Tokenizer.from_file(str(bundle / TOKENIZER))
        first = encoder.encode("").ids[:1]
        ids = encoder.encode(TEXT, add_special_tokens=False).ids
        length = build.capacity - len(first)
        pieces = [first + ids[at : at + length] for at in range(0, len(ids), length)]
        for role in manifest.roles:
            session = engines.session(role, batch=1)
            losses: list[float] = []
            for piece in pieces:
                for at in range(0, len(piece) - 1, build.max_prompt_chunk):
                    chunk = piece[at : min(at + build.max_prompt_chunk, len(piece) - 1)]
                    logits = session.run(np.array([chunk]), np.array([at]))[0].astype(np.float64)
                    following = np.array(piece[at + 1 : at + 1 + len(chunk)])
                    greatest = logits.max(-1, keepdims=True)
                    total = greatest[:, 0] + np.log(np.exp(logits - greatest).sum(-1))
                    chosen = logits[np.arange(len(chunk)), following]
                    losses += (total - chosen)[np.isfinite(chosen)].tolist()  # a short head leaves out some tokens
            del session  # one model in memory at a time
            quantization = manifest.models[role].quantization
            block = quantization.block if quantization else "-"
            perplexity = np.exp(np.mean(losses))
            print(f"| {bundle.name} | {build.backend} | {block} | {role} | {len(losses):,} | {perplexity:.3f} |", flush=True)
