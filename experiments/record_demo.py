"""Record the output of `outrider generate --show` as docs/demo.svg, with its colours.

make demo && .venv/bin/python -m outrider.experiments.record_demo
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
ARGUMENTS = ["generate", "build/demo/bundle", "--prompt", "Customer: Hi, I would like to book a table for two in San Jose."]
ARGUMENTS += ["--max-new-tokens", "96", "--k", "4", "--show"]


def main() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [str(ROOT / ".venv/bin/outrider"), *ARGUMENTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    shown = [f'"{argument}"' if " " in argument else argument for argument in ARGUMENTS]
    console.print(f"[bold]$ outrider {' '.join(shown)}[/bold]", highlight=False)
    console.print(Text.from_ansi(done.stdout))
    console.save_svg(str(ROOT / "docs" / "demo.svg"), title="outrider")


if __name__ == "__main__":
    main()
