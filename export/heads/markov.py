"""The Markov and confidence heads of a block head (DSpark, arXiv 2607.05147), as a separate graph.

A block head drafts all its tokens in one pass, so it does not know the previous token of any of them. Before a token is drawn,
its logits get a bias that depends on the previous token: W2 W1[token], or W2 (g W1[token]) with g = sigmoid(gate(row,
W1[token])). The confidence head estimates the probability that the token will be accepted: sigmoid(proj(row, W1[token])).
Without a confidence head, the estimate is the probability of the most likely token.

The part of these heads that depends only on the row is an output of the step model, `block_state`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from outrider.engines.contract import BATCH_DIM, BLOCK_STATE, LOGITS
from outrider.export.checkpoints.streamed import Streamed
from outrider.export.graph.tracing import to_onnx
from outrider.export.heads.block_head import BlockHead
from outrider.export.parity import compare, open_graph
from outrider.export.weights.quantize import pack

CASES = 8  # random rows that are compared


class MarkovStep(nn.Module):
    """The module to trace."""

    def __init__(self, head: BlockHead):
        super().__init__()
        self.model = head

    def forward(self, logits: torch.Tensor, state: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `biased` [B, 1, V] and `confidence` [B, 1].

        Args:
            logits: [B, 1, V].
            state: a row's `block_state`, [B, 1, A].
            before: the previous tokens, int64 [B, 1].
        """
        markov, confidence = (getattr(self.model, name, None) for name in ("markov_head", "confidence_head"))
        sure = state[..., 0]
        if markov is not None:
            embedded = markov.markov_w1(before).to(self.model.dtype)
            if confidence is not None and confidence.proj.reads_token:
                sure = sure + confidence.proj.of_token(embedded)[..., 0].float()
            if markov.gate_proj is not None:
                gate = state[..., 1:].to(self.model.dtype) + markov.gate_proj.of_token(embedded)
                embedded = torch.sigmoid(gate) * embedded
            logits = logits + markov.markov_w2(embedded).float()
        if confidence is not None:
            return logits, torch.sigmoid(sure)
        return logits, 1 / torch.exp(logits - logits.amax(-1, keepdim=True)).sum(-1)


def export_markov(head: BlockHead, path: Path, vocab_rows: int, precision: str) -> None:
    """Write the graph of a block head's own heads with its weights, and compare it with the checkpoint.

    Raises:
        ParityError: the results differ.
        UnsupportedModelError: ONNX cannot express the heads.
    """
    assert head.block_state is not None
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(CASES, 1, vocab_rows, generator=generator)
    state = torch.randn(CASES, 1, head.block_state, generator=generator)
    before = torch.randint(0, vocab_rows, (CASES, 1), generator=generator)
    step, dims = MarkovStep(head), {0: BATCH_DIM}
    inputs = {LOGITS: logits, BLOCK_STATE: state, "before": before}
    program = to_onnx(step, (*inputs.values(),), (dims, dims, dims), [*inputs], ["biased", "confidence"], type(head).__name__)
    pack(program, head, Streamed())
    program.save(path, external_data=True)
    with torch.no_grad():
        expected = step(logits, state, before)
    actual = open_graph(path, precision).run(None, {name: values.numpy() for name, values in inputs.items()})
    finite = np.isfinite(expected[0][:, 0].numpy()).all(0)
    compare(expected[0][:, 0].numpy()[:, finite], actual[0][:, 0][:, finite], precision, "biased logits")
    compare(expected[1].numpy(), actual[1], precision, "confidences")
