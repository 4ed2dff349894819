"""Profile the kernels of a bundle's models on the CPU, for each number of rows.

Prints a Markdown table from ONNX Runtime's own profile of 20 passes that end at position 200, after 5 warm-up passes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np

from outrider.backends.onnxruntime import pool
from outrider.backends.open import open_bundle, open_engines
from outrider.experiments.measure import arguments

POSITION, WARM, RUNS, SHOWN = 200, 5, 20, 4


@click.command(help=__doc__)
@arguments.bundle
def command(bundle: Path) -> None:
    manifest, build = open_bundle(bundle)
    if build.backend != "onnxruntime" or build.capacity < POSITION:
        raise click.UsageError(f"{bundle} must be an onnxruntime bundle with a capacity of {POSITION} or more")
    folder = Path(tempfile.mkdtemp())
    default_options = pool.session_options

    def profiled(threads: int | None = None) -> Any:
        options = default_options(threads)
        options.enable_profiling, options.profile_file_prefix = True, str(folder / "profile")
        return options

    pool.session_options = profiled
    ids = np.random.default_rng(0).integers(0, manifest.vocab_tokens, (1, POSITION), dtype=np.int64)
    print("| model | rows | kernels, ms per pass |" + " largest |" * SHOWN)
    print("|---" * (3 + SHOWN) + "|")
    for role in manifest.roles:
        for rows in [1, *(k + 1 for k in build.k)]:
            session = open_engines(bundle, manifest, build).session(role, batch=1)
            start = POSITION - rows
            for at in range(0, start, build.max_prompt_chunk):
                session.write(ids[:, at : min(at + build.max_prompt_chunk, start)], np.array([at]))
            for _ in range(WARM + RUNS):
                session.run(ids[:, start:], np.array([start]))
            file = Path(session.engine._session.end_profiling())  # type: ignore[attr-defined]
            events = json.loads(file.read_text())
            os.remove(file)
            begun = sorted(event["ts"] for event in events if event["name"] == "model_run")[-RUNS]
            spent: Counter[str] = Counter()
            for event in events:
                if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= begun:
                    spent[event["args"]["op_name"]] += event["dur"]
            total = sum(spent.values())
            largest = (f" {name} {time / total:.1%} |" for name, time in spent.most_common(SHOWN))
            print(f"| {role} | {rows} | {total / RUNS / 1000:.1f} |" + "".join(largest), flush=True)
    folder.rmdir()
