"""Repeats the samples of a small pilot until every method has decoded enough rows for an interval."""

from __future__ import annotations

import math
from dataclasses import replace

from configs.method import MethodConfig
from configs.pool import EnginePoolConfig
from pipeline.pilot.estimate import Pilot
from pipeline.pilot.verdict import needed_rows, pilot_method

SPARE = 1.25
"""Factor on the needed rows, because the last rows of a pilot do not fill the slots."""
HISTORY = ("suffix",)
"""Drafters that copy from finished rows, to which a repeated row is easier than a new one."""


def repeated(pilot: Pilot, method: MethodConfig, pool: EnginePoolConfig, rows_per_sample: int = 1) -> Pilot:
    """Return the pilot with as many repeats of its samples as a comparison of the methods needs.

    Each method then decodes about the same samples, so that their differences are those of the methods. Without repeats
    if `pool.slots` is auto, or a drafter copies from finished rows.
    """
    needed = needed_rows(method, pool)
    if needed is None or any(entry.drafter.kind in HISTORY for entry in pilot_method(method).methods):
        return pilot
    num_rows = pilot.size * rows_per_sample
    return pilot if num_rows >= needed else replace(pilot, repeats=math.ceil(SPARE * needed / num_rows))
