"""What `python -m outrider.experiments.measure` measures: a file for each mode."""
