"""Export checkpoints as ONNX step models."""

import os

# tqdm reads this once, when it is imported. Progress bars of other libraries would garble ours, and the log.
os.environ.setdefault("TQDM_DISABLE", "1")
