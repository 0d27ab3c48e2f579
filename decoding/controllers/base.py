"""How deep the next step's trees may be: the seam between the engine and whoever decides, and the one who never does.

The engine asks before every step and tells afterwards what the step gave and what it took. Host numbers only: nothing
here knows tensors, devices, drafters or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["fixed", "last", "start", "best", "explore"]
"""Why a step has the depth it has: nobody chooses; no row has a use for a draft; the first steps, which measure; it
promises the most tokens per second; it is tried, because it was not measured or not for long."""


@dataclass(frozen=True)
class Choice:
    """At most `levels` levels for the next step, 0 for none: plain decoding, without a call of the drafter.

    `tokens_per_s` and `plain_tokens_per_s` are what the choice and plain decoding are expected to give, all rows
    together; 0 where nothing is known yet.
    """

    levels: int
    reason: Reason
    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0


@dataclass(frozen=True)
class Reading:
    """Prompts that a drafter read: tokens and seconds, of all together."""

    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What one step gave and took.

    `seconds` are the whole step's, and `draft_s`, `verify_s` and `commit_s` its phases as the host's clock saw them.
    Row by row: `accepted` drafts, and `offered`, the deepest draft that the row had a use for. `num_missed` tokens, of
    all rows together, were the drafter's to catch up on first. `reading` is what it read of prompts since the step
    before, in time of its own, and `ended` has the prompt's tokens of every row that ended; both as the target counts.
    A step that the host looked at late (`is_late`) may have taken less than its `seconds`.
    """

    levels: int
    seconds: float
    draft_s: float
    verify_s: float
    commit_s: float
    accepted: Sequence[int]
    offered: Sequence[int]
    num_missed: int = 0
    reading: Reading = Reading()
    ended: Sequence[int] = ()
    is_late: bool = False

    @property
    def num_active(self) -> int:
        """Rows of the step."""
        return len(self.accepted)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step made: each row's accepted drafts, and the target's own."""
        return sum(self.accepted) + len(self.accepted)


class Controller(Protocol):
    """Decides before each step how deep its trees may be; one engine's own.

    Depths that follow from time leave the output alone only where acceptance is `exact`.
    """

    @property
    def is_off(self) -> bool:
        """Whether nothing is drafted for the time being, so that a drafter need not read prompts yet."""
        ...

    @property
    def can_be_off(self) -> bool:
        """Whether a step that could have had drafts may have none."""
        ...

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> Choice:
        """The next step's depth, at most `max_levels`, for `num_active` rows.

        A drafter would have `num_unread` tokens of prompts to read first, and `num_missed` more to catch up on.
        """
        ...

    def learn(self, outcome: Outcome, choice: Choice) -> None:
        """Follow a step and what had been chosen for it; others may have been chosen since."""
        ...


class Fixed:
    """As deep as the tree wants, always."""

    is_off = False
    can_be_off = False

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> Choice:
        return Choice(max_levels, "fixed")

    def learn(self, outcome: Outcome, choice: Choice) -> None:
        pass


def batch_class(num_active: int) -> int:
    """The power of two that `num_active` rows are counted with: 1, 2, 4, 8, …, each with all below it down to the
    next smaller one."""
    return 1 << (num_active - 1).bit_length()
