"""What a policy decides before a round."""

from __future__ import annotations

from typing import NamedTuple

NONE = "none"  # stands for the drafter if a round drafts nothing
AUTO = "auto"  # stands for a k or a drafter that is chosen for every round


class Choice(NamedTuple):
    """How a round drafts."""

    drafter: str  # a drafter's name, or `NONE`
    k: int  # draft tokens: a built number, or 0


PLAIN = Choice(NONE, 0)
