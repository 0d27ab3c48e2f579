"""Checks before a job starts that its target takes the videos that it declares."""

from __future__ import annotations

from configs.load import ConfigError
from configs.source import Source


def check(source: Source, takes_videos: bool, target: str) -> None:
    """Raise ConfigError if the job file declares videos and the target takes none; videos inside tars are unknown."""
    dotted = "source.kind" if source.kind == "videos" else "source.columns.video"
    if not takes_videos and (source.kind == "videos" or source.columns.video is not None):
        raise ConfigError(f"{dotted}: {target} takes no videos; LLaVA-OneVision and the Qwen-VL families do")
