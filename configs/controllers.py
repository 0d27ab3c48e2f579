"""Controllers of the draft depth: fixed, or from measured step times and acceptance rates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Section


class NoController(Section):
    """Trees are as deep as `tree` has them, at every step."""

    kind: Literal["none"] = "none"
    """As deep as `tree` has them."""


class MeasuredController(Section):
    """As deep as promises the most tokens per second for the rows in work, up to the depth of `tree`; off where plain
    decoding is faster. Acceptance must be `exact`."""

    kind: Literal["measured"] = "measured"
    """As deep as promises the most tokens per second for the rows in work, off where plain decoding is faster;
    acceptance must be `exact`."""
    max_exploration: Annotated[float, Field(ge=0.0, le=0.5)] = 0.01
    """Share of steps, and of time lost, that trials of other depths may take."""


Controller = Annotated[NoController | MeasuredController, Field(discriminator="kind")]
