"""Formats estimates with two significant digits, their units and their intervals."""

from __future__ import annotations

import math

from pipeline.pilot.verdict import Range

TIMES = ((86_400 * 2, 86_400, "days"), (5_400, 3600, "h"), (90, 60, "min"), (0, 1, "s"))
"""From how many seconds on which unit of how many seconds is used."""
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (0, "kB"))


def figure(value: float) -> str:
    """Return a number with two significant digits, without an exponent."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    digits = 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(0, digits)}f}"


def shown(interval: Range, unit: str = "") -> str:
    """Return a value with its interval, if that is not empty, and its unit."""
    text = figure(interval.value)
    if interval.high - interval.low > 1e-9 * abs(interval.value):
        text += f" ({figure(interval.low)} to {figure(interval.high)})"
    return f"{text} {unit}".rstrip()


def count(interval: Range) -> str:
    """Return a number of rows: exact if it is known, else with two digits."""
    is_known = interval.high - interval.low <= 1e-9 * abs(interval.value)
    return f"{interval.value:,.0f}" if is_known else shown(interval)


def time(seconds: Range) -> str:
    """Return seconds in the unit that suits the value."""
    _, unit_s, name = next(entry for entry in TIMES if seconds.value >= entry[0])
    return shown(seconds.times(1 / unit_s), name)


def size(num_bytes: Range) -> str:
    """Return bytes in the unit that suits the value."""
    least, name = next(entry for entry in SIZES if num_bytes.value >= entry[0])
    return shown(num_bytes.times(1 / (least or 1e3)), name)
