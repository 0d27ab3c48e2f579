"""Controllers: interface that chooses the depth of the next step's trees, and a fixed depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["fixed", "last", "start", "best", "explore"]
"""Why a depth was chosen: it never changes; no row can use a draft; initial measurement; best goodput; exploration."""


@dataclass(frozen=True)
class Choice:
    """At most `levels` levels for the next step; 0 is plain decoding without the drafter.

    `tokens_per_s` and `plain_tokens_per_s` are the expected goodputs of the choice and of plain decoding, all rows
    together; 0 if unknown.
    """

    levels: int
    reason: Reason
    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0


@dataclass(frozen=True)
class PrefillTime:
    """Tokens and seconds of drafter prefills."""

    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Result and cost of one step.

    By row: `accepted` drafts, and `offered`, the deepest useful draft. The drafter first caught up on `num_missed`
    tokens of all rows. `prefill` is its prompt prefill since the last step, not part of `seconds`; `ended` has the
    prompt length of every row that finished. `seconds` is an upper bound if the output was processed late (`is_late`).
    """

    levels: int
    seconds: float
    accepted: Sequence[int]
    offered: Sequence[int]
    num_missed: int = 0
    prefill: PrefillTime = PrefillTime()
    ended: Sequence[int] = ()
    is_late: bool = False

    @property
    def num_active(self) -> int:
        """Rows of the step."""
        return len(self.accepted)

    @property
    def num_tokens(self) -> int:
        """Generated tokens: accepted drafts and one target token per row."""
        return sum(self.accepted) + len(self.accepted)


class Controller(Protocol):
    """Chooses the depth of each step's trees; each engine has its own.

    Depths that depend on time keep the output unchanged only with the acceptance `exact`.
    """

    @property
    def is_off(self) -> bool:
        """Whether drafting is off at present, so that drafter prefill can wait."""
        ...

    @property
    def can_be_off(self) -> bool:
        """Whether the controller may turn drafting off."""
        ...

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> Choice:
        """The next step's depth, at most `max_levels`, for `num_active` rows.

        Drafting requires a prefill of `num_unread` prompt tokens and a catch-up on `num_missed` tokens first.
        """
        ...

    def learn(self, outcome: Outcome, choice: Choice) -> None:
        """Update from a step and its choice; later steps may already have been chosen."""
        ...


class FixedDepth:
    """Always the tree's own depth."""

    is_off = False
    can_be_off = False

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> Choice:
        return Choice(max_levels, "fixed")

    def learn(self, outcome: Outcome, choice: Choice) -> None:
        pass


def batch_class(num_active: int) -> int:
    """The batch class of `num_active` rows: the next power of two."""
    return 1 << (num_active - 1).bit_length()
