"""A held-out text, and the perplexity of a model on it. It was written for this file, so no checkpoint was trained on it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
import torch
from tokenizers import Tokenizer

from outrider.bundle.manifest import Parity
from outrider.engines.arrays import Floats
from outrider.errors import ParityError
from outrider.export.checkpoints.tokenizer import TokenizerFiles
from outrider.export.weights.rounding import Rounding

# Tokens of the text per pass. Every other piece is read, about 500 tokens of all its kinds. The ratio of two perplexities then
# has a standard error of 1 to 4% with int4 and below 1% with int8, which is enough for `MAX_PERPLEXITY_RATIO`. The whole text
# would lower it to 0.7 times as much, but these passes are already the longest part of the export of a large model.
PIECE = 128
# The maximum perplexity of a quantized model, as a multiple of the perplexity in fp32. Eight bits cost almost nothing. Four
# bits cost from a few to twenty percent in good models; 1.5 is about the ratio between two model sizes of a family.
MAX_PERPLEXITY_RATIO = {"int4": 1.5, "int8": 1.1}
TEXT = '''\
The ferry left an hour late, because the man who worked the ramp had gone home to look for his dog. Nobody minded much.
A woman in a yellow coat shared out plums from a paper bag, and two brothers argued about whether the lighthouse on the far
side had been painted since the spring. By the time the engine started, the fog had lifted from the harbour, and the hills
stood up behind the town as sharp as if they had been cut out with scissors. I had a letter in my pocket that I had read
four times. It said that the house was mine if I wanted it, that the roof leaked over the kitchen, and that my uncle had
left a list of people to whom he owed a visit. There were thirty-one names on it. I knew three of them.

What surprised me, when I first opened the door, was the smell of apples. He had laid them out on newspaper in every room,
hundreds of them, none touching another, the way his mother had taught him. On the table was a clock that ran backwards. It
had belonged to a barber, who hung it opposite the mirror so that his customers could tell the time while he cut their hair.

"Did you sleep?" asked Marta.
"A little. There is a bird under the roof."
"An owl. He will not hurt you. He has been there longer than the stairs."
"Then I suppose that I ought to pay him rent. What do you want for the bread?"
"Nothing today. Tomorrow you can help me carry the flour up from the boat, and we will see how strong you are."
"And if I am not strong?"
"Then you will be by winter."

A steel bridge grows longer on a hot day. One of four hundred metres gains about five centimetres for each ten degrees, which
is why its ends rest on rollers, and why there is a toothed gap in the road that hums under the wheels. Engineers do not
fight this movement; they give it room. The same holds for railway lines, for the pipes of a heating plant, and for the glass
of a tall window, which sits in its frame on strips of rubber and touches metal nowhere.

def longest_run(values: list[int]) -> tuple[int, int]:
    """The start and the length of the longest stretch of rising values; the first one where several are as long."""
    best_start, best_length, start = 0, 0, 0
    for index, value in enumerate(values):
        if index > 0 and value <= values[index - 1]:
            start = index
        if index - start + 1 > best_length:
            best_start, best_length = start, index - start + 1
    return best_start, best_length


class Ledger:
    def __init__(self, owner: str):
        self.owner = owner
        self.entries: dict[str, float] = {}

    def add(self, account: str, amount: float) -> None:
        if amount == 0:
            raise ValueError("an entry of nothing")
        self.entries[account] = self.entries.get(account, 0.0) + amount

    def balance(self) -> float:
        return sum(self.entries.values())

for (let row = 0; row < grid.length; row++) {
  const filled = grid[row].filter((cell) => cell !== null).length;
  if (filled === grid[row].length) {
    grid.splice(row, 1);
    grid.unshift(new Array(columns).fill(null));
  }
}

Customer: Hello, my order 4417 says that it was delivered on Monday, but there was nothing at the door.
Agent: I am sorry about that. May I ask whether a neighbour could have taken it in?
Customer: I have asked both. One of them saw the van stop, but nobody got out.
Agent: Thank you, that helps. I have opened a search with the carrier, which takes two working days. If they cannot find the
parcel, I will send the lamp again at no cost, or return the 38 euros to your card. Which would you like?
Customer: Send it again, please, but to my office. The address is the same as for my last order.

Question: A tank holds 240 litres. One pipe fills it in 6 hours, another empties it in 8 hours. Both are open. How long does
it take to fill the empty tank?
Answer: The first pipe brings 240 / 6 = 40 litres an hour. The second takes 240 / 8 = 30 litres an hour. Together they leave
40 - 30 = 10 litres an hour in the tank, so it is full after 240 / 10 = 24 hours.
'''


def heldout_tokens(tokenizer: TokenizerFiles, positions: int | None) -> list[torch.Tensor]:
    """Return half of the text as pieces int64 [1, S]. Each has at most `PIECE` tokens and the tokenizer's first token."""
    encoder = Tokenizer.from_str(tokenizer.json)
    first = encoder.encode("").ids[:1]
    tokens = encoder.encode(TEXT, add_special_tokens=False).ids
    length = min(PIECE, positions or PIECE) - len(first)
    pieces = [first + tokens[at : at + length] for at in range(0, len(tokens), 2 * length)]
    return [torch.tensor([piece]) for piece in pieces if len(piece) > 1]


def perplexity(logits: Iterable[Floats], pieces: list[torch.Tensor], known: torch.Tensor) -> float:
    """Return the perplexity: exp of the mean of -log p over all tokens except the first of each piece.

    Args:
        logits: float32 [S, V] of each piece.
        pieces: int64 [1, S].
        known: bool [V], the tokens to count.
    """
    losses = []
    for piece, floats in zip(pieces, logits, strict=True):
        rows = torch.from_numpy(floats)[:-1]
        targets = piece[0, 1:]
        losses.append(torch.nn.functional.cross_entropy(rows, targets, reduction="none")[known[targets]])
    mean = float(torch.cat(losses).double().mean())
    return math.exp(min(mean, 700.0))  # avoids overflow; NaN stays NaN


def check_perplexity(
    parity: Parity, quantized: float, reference: float, rounding: Rounding, unrounded: float | None = None
) -> Parity:
    """Compare the perplexity of a quantized model with the perplexity in fp32, and return `parity` with all of them.

    Args:
        parity: of the logits.
        quantized: as served, with rounded activations.
        reference: of the checkpoint.
        rounding: how weights were rounded.
        unrounded: with fp32 activations, if known.

    Raises:
        ParityError: quantization raises the perplexity too much.
    """
    limit = reference * MAX_PERPLEXITY_RATIO["int4" if "int4" in (rounding.precision, rounding.head_precision) else "int8"]
    if not quantized <= limit:  # also true for NaN
        raise ParityError(
            f"quantization to {rounding.precision} loses too much: perplexity on held-out text is {quantized:.4g}, compared"
            f" with {reference:.4g} in fp32, and the limit is {limit:.4g}",
            "export with --head-precision fp32, --method auto-round, or --precision int8; or else with fp32, fp16 or bf16",
        )
    return msgspec.structs.replace(parity, perplexity=quantized, reference_perplexity=reference, unrounded_perplexity=unrounded)
