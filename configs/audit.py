"""Defines the section `audit` of a caption job: plain decoding beside a lossy method, and the loss that it may have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Section


class Audit(Section):
    """Decodes a share of the rows plainly too, beside a lossy method, and bounds the loss; see the
    [guide](../guides/verify.md#loss-budget)."""

    share: Annotated[float, Field(gt=0.0, le=1.0)]
    """The share of rows that are decoded twice, chosen by a hash of `job.seed` and the row's id."""
    metric: Annotated[str, Field(pattern=r"^(exact|edit|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "exact"
    """Loss of a row: `exact` (1 if tokens differ, else 0), `edit` (edit distance of the tokens over the longer length),
    or a Python function `module:function` that receives the row's text and the plain text, and returns a number from 0
    to 1."""
    max_loss: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """The budget: largest mean loss of the job; by default the loss is only reported."""
    on_exceeded: Literal["stop", "lossless"] = "stop"
    """What follows if the budget is exceeded: `stop` ends the job with exit status 4; `lossless` decodes the rows that
    are left with acceptance `exact`."""
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95
    """Confidence of the interval of the mean loss, at all numbers of rows together."""
    min_rows: Annotated[int, Field(ge=1)] = 1000
    """The budget is exceeded if the interval is above `max_loss`; from this number of audited rows on, also if its
    upper end is."""
