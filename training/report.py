"""What a training leaves beside its draft: `training.json`, `README.md`, and the curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from outrider.runtime.stats import Stats


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """How a draft was trained, and how good it is."""

    kind: str
    target: str
    parameters: int  # that were trained
    examples: int
    tokens: int  # of the assistant
    history: list[dict[str, float]]
    trained: Stats  # over the answers to the held-out prompts, by the modules that were trained
    served: Stats  # over the same answers, when they were served

    def as_dict(self) -> dict[str, object]:
        """Return what a script would read."""
        return {
            "kind": self.kind,
            "target": self.target,
            "parameters": self.parameters,
            "examples": self.examples,
            "tokens": self.tokens,
            "mean_acceptance_length": self.served.mean_acceptance_length,
            "mean_acceptance_length_in_training": self.trained.mean_acceptance_length,
            "acceptance_by_position": self.served.per_position_rates,
            "history": self.history,
        }


def write_report(folder: Path, report: TrainingReport) -> None:
    """Write the report's files into a draft's folder.

    Raises:
        OSError: they cannot be written.
    """
    (folder / "training.json").write_bytes(msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=2) + b"\n")
    rates = " ".join(f"{rate:.2f}" for rate in report.served.per_position_rates)
    lines = [
        f"# A draft for {report.target}",
        "",
        f"Trained by `outrider train-draft --kind {report.kind}` on {report.examples:,} answers of the target,"
        f" {report.tokens:,} tokens. {report.parameters:,} parameters were trained.",
        "",
        f"On held-out prompts, a round of the served draft emits {report.served.mean_acceptance_length:.2f} tokens"
        f" ({report.trained.mean_acceptance_length:.2f} of the same texts by the modules that were trained)."
        f" Accepted by position: {rates}.",
        "",
        "![Loss and mean acceptance length by update](training.svg)",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _plot(folder / "training.svg", report.history)


def _plot(path: Path, history: list[dict[str, float]]) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, key, label in ((left, "loss", "loss"), (right, "mean_acceptance_length", "mean acceptance length, held out")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot(*zip(*points, strict=True) if points else ([], []))
        axes.set_xlabel("update")
        axes.set_ylabel(label)
    figure.savefig(path, metadata={"Date": None})
