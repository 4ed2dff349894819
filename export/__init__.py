"""Export checkpoints as ONNX step models."""

import os

# Progress bars of other libraries would garble ours and the log. tqdm reads this variable when it is imported.
os.environ.setdefault("TQDM_DISABLE", "1")
