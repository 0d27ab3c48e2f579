"""Checks of a job's video settings before anything starts. Imports no decoder."""

from __future__ import annotations

import importlib.util

from configs.load import ConfigError
from configs.schema import Source

MODULES = {"auto": "av", "pyav": "av", "decord": "decord", "torchcodec": "torchcodec"}
"""What each decoder needs beside PyAV, which opens every file; `auto` makes do without decord."""


def has_videos(source: Source) -> bool:
    """Whether the job file declares videos; tars may contain them without a declaration."""
    return source.kind == "videos" or source.columns.video is not None


def check(source: Source, takes_videos: bool, target: str) -> None:
    """Refuse videos that cannot be decoded here or that the target does not support.

    Raises:
        ConfigError: a library is missing, or the target takes no videos.
    """
    if not has_videos(source):
        return
    decoder = source.video.decoder
    for module in dict.fromkeys(("av", MODULES[decoder])):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"source.video.decoder: {decoder!r} needs the Python package {module!r}, which is not installed; "
                f"install it into this environment, or choose another decoder"
            )
    if not takes_videos:
        said = "source.kind" if source.kind == "videos" else "source.columns.video"
        raise ConfigError(f"{said}: {target} takes no videos; LLaVA-OneVision and the Qwen-VL families do")
