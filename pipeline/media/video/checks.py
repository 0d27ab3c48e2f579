"""Checks a job's video settings before the job starts. Imports no decoder."""

from __future__ import annotations

import importlib.util

from configs.load import ConfigError
from configs.source import Source

MODULES = {"auto": "av", "pyav": "av", "decord": "decord"}
"""The Python package of each decoder. PyAV is always needed, because it opens every file; `auto` needs no decord."""


def check(source: Source, takes_videos: bool, target: str) -> None:
    """Raise ConfigError if the job file declares videos and they cannot be decoded here or the target takes no videos.

    Videos inside tars are not declared and not checked.
    """
    if source.kind != "videos" and source.columns.video is None:
        return
    decoder = source.video.decoder
    for module in dict.fromkeys(("av", MODULES[decoder])):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"source.video.decoder: {decoder!r} needs the Python package {module!r}, which is not installed; "
                f"install it into this environment, or choose another decoder"
            )
    if not takes_videos:
        dotted = "source.kind" if source.kind == "videos" else "source.columns.video"
        raise ConfigError(f"{dotted}: {target} takes no videos; LLaVA-OneVision and the Qwen-VL families do")
