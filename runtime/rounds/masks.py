"""Apply grammars to logits on the host, between a pass and the sampler that reads them."""

from __future__ import annotations

import numpy as np

from outrider.runtime.grammar.errors import GrammarError
from outrider.runtime.rounds.buffers import VERIFIER, Lane, RoundState, Shape
from outrider.runtime.rounds.host_sampler import drafted_tokens, target_rows
from outrider.runtime.rounds.launches import Launches


def mask_row(launches: Launches, state: RoundState, row: int) -> None:
    """Mask the logits that the sampler of a row reads, in all lanes with a grammar, and note the valid rows. A lane whose masks
    cannot be computed fails."""
    masked = [index for index in state.rows if row == VERIFIER or row < state.lanes[index].steps]
    for index in [index for index in masked if index in state.active]:
        try:
            state.rows[index] = _mask(launches, row, state.shape, index, state.lanes[index])
        except GrammarError as error:
            state.fail(index, error)


def _mask(launches: Launches, row: int, shape: Shape, index: int, lane: Lane) -> int:
    """Set the logits of forbidden tokens to minus infinity: those of the drafted token in that row, or of all rows of the
    target's pass. Rows after a token outside the grammar do not matter, and stay unchanged.

    Returns:
        the number of valid rows; see `Matcher.masks`.

    Raises:
        GrammarError: the masks exceed a limit, or allow no token.
    """
    assert lane.sampling is not None
    grammar, device = lane.sampling.grammar, launches.device
    assert grammar is not None
    drafted = drafted_tokens(launches, shape, index)
    drafted = drafted[: lane.k if row == VERIFIER else row]
    masks, rows = grammar.masks(drafted)
    masks = masks[0 if row == VERIFIER else row :]
    if not masks:
        return rows
    if row == VERIFIER:
        buffer = target_rows(launches, shape, index, len(masks))
    else:
        drafter = launches.on_device(shape)
        assert drafter is not None
        buffer = drafter.row_logits(row, shape, index)
    logits = device.read(buffer)
    for values, allowed in zip(logits, masks, strict=True):
        if not values.sum() < np.inf:  # the sampler has to see NaN
            continue
        if row == VERIFIER or values[allowed].max() > -np.inf:  # the draft's vocabulary may lack all allowed tokens
            np.copyto(values, -np.inf, where=~allowed)
    if not device.synchronous:  # otherwise the memory is the host's
        device.write(buffer, logits)
    return rows
