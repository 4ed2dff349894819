"""What a policy decides on before a round."""

from __future__ import annotations

from typing import NamedTuple

from outrider.runtime.drafters.base import NONE

AUTO = "auto"  # stands for a k or a drafter that is chosen for every round


class Choice(NamedTuple):
    """How a round drafts."""

    drafter: str  # a drafter's name, or `NONE`
    k: int  # a number of draft tokens that was built, or 0


PLAIN = Choice(NONE, 0)
