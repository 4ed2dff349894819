"""Checkpoints become ONNX step models."""

import os

# Read once, when tqdm is imported: the readers' own progress bars would break ours and the plain log.
os.environ.setdefault("TQDM_DISABLE", "1")
