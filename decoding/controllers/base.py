"""Defines the base class of controllers, which choose the depth of the next step's trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["fixed", "last", "start", "best", "explore"]
"""Reason for a depth: fixed depth; no row can use a draft; initial measurement; best goodput; exploration."""


@dataclass(frozen=True)
class DepthChoice:
    """Choice of at most `levels` tree levels for the next step; 0 is plain decoding without the drafter.

    `tokens_per_s` and `plain_tokens_per_s` are the expected goodputs of the choice and of plain decoding, 0 if unknown.
    """

    levels: int
    reason: Reason
    tokens_per_s: float = 0.0
    plain_tokens_per_s: float = 0.0


@dataclass(frozen=True)
class PrefillTime:
    """Number of prompt tokens and seconds of drafter prefills."""

    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StepOutcome:
    """Result and time of one step.

    Per row, `accepted` is the number of accepted drafts and `offered` the depth of the deepest useful draft. The
    drafter first ran `num_missed` tokens, summed over rows, that were generated without drafts. `prefill` is the
    drafter's prompt prefill since the last step, not part of `seconds`; `ended` lists the prompt lengths of the rows
    that finished. `seconds` is an upper bound if `is_late`: the output was processed late, or the step was a warm-up.
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
        """Number of rows of the step."""
        return len(self.accepted)

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens: accepted drafts and one target token per row."""
        return sum(self.accepted) + len(self.accepted)


class Controller:
    """Chooses the depth of each step's trees for one engine; the base class always chooses the maximum depth.

    Depths may depend on measured times; the output is independent of the depth only with the acceptance rule `exact`.
    """

    can_be_off = False
    """Whether the controller may turn drafting off."""

    @property
    def is_off(self) -> bool:
        """Whether drafting is currently off, so that drafter prefill can wait."""
        return False

    def choose(self, num_active: int, max_levels: int, num_missed: int, num_unread: int) -> DepthChoice:
        """Choose the next step's depth, at most `max_levels`, for `num_active` rows.

        Before it can draft, the drafter must prefill `num_unread` prompt tokens and run `num_missed` output tokens.
        """
        return DepthChoice(max_levels, "fixed")

    def learn(self, outcome: StepOutcome, choice: DepthChoice) -> None:
        """Update estimates from a step and its choice; `choose` may already have been called for later steps."""


def batch_class(num_active: int) -> int:
    """Return the batch class of `num_active` rows: `num_active` rounded up to a power of two."""
    return 1 << (num_active - 1).bit_length()
