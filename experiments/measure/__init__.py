"""The modes of `python -m outrider.experiments.measure`, one per file."""
