"""Describes which part of a video was decoded and why, for the column `partial_video`; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

LATE_START, DAMAGED = "late_start", "damaged"
KINDS = (LATE_START, DAMAGED)
"""Words with which descriptions begin; a text may have several, each followed by a colon."""
MAX_REASON_CHARS = 300


def late_start(num_frames: int, seconds: float) -> str:
    """Describe pictures before the first that can be decoded; empty if there are none."""
    text = f"{LATE_START}: the first {num_frames} frames, {_number(seconds)} s, need pictures that the file lacks"
    return text if num_frames else ""


def good_part(num_frames: int, seconds: float, damage: str) -> str:
    """Describe the frames before damage."""
    return f"{DAMAGED}: the first {num_frames} frames, {_number(seconds)} s, are used; {damage[:MAX_REASON_CHARS]}"


def traces(num_damaged: int, num_frames: int) -> str:
    """Describe damaged frames that are shown; empty if there are none."""
    text = f"{DAMAGED}: {num_damaged} of {num_frames} sampled frames have traces of lost data"
    return text if num_damaged else ""


def joined(descriptions: Iterable[str]) -> str:
    """Join descriptions of one video, or of several; empty ones are left out."""
    return "; ".join(filter(None, descriptions))


def _number(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
