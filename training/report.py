"""The report beside a trained draft: `training.json` and `README.md`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from outrider.runtime.stats import Stats


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """How a draft was trained, and how well it drafts."""

    kind: str
    target: str
    parameters: int  # trained ones
    examples: int
    tokens: int  # of the assistant
    history: list[dict[str, float]]
    trained: Stats  # the PyTorch draft on answers to the held-out prompts
    served: Stats  # the served draft on the same answers

    def as_dict(self) -> dict[str, object]:
        """Return the report for `training.json`."""
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
        OSError: a file cannot be written.
    """
    (folder / "training.json").write_bytes(msgspec.json.format(msgspec.json.encode(report.as_dict()), indent=2) + b"\n")
    rates = " ".join(f"{rate:.2f}" for rate in report.served.per_position_rates)
    losses = [entry for entry in report.history if "loss" in entry]
    lines = [
        f"# A draft for {report.target}",
        "",
        f"`outrider train-draft --kind {report.kind}` trained {report.parameters:,} parameters on {report.examples:,} answers"
        f" of the target ({report.tokens:,} tokens).",
        "",
        f"On held-out prompts, the served draft emits {report.served.mean_acceptance_length:.2f} tokens per round"
        f" ({report.trained.mean_acceptance_length:.2f} on the same texts in PyTorch). Acceptance by position: {rates}.",
        "",
        "| update | loss | mean acceptance length on held-out prompts |",
        "|---|---|---|",
    ]
    for entry in report.history:
        if "mean_acceptance_length" in entry:
            loss = next((f"{each['loss']:.3f}" for each in reversed(losses) if each["step"] <= entry["step"]), "")
            lines.append(f"| {entry['step']:,} | {loss} | {entry['mean_acceptance_length']:.2f} |")
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
