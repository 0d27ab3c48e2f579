"""Tests the demo's videos: real files show their motions, and the demo's check finds every error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np

from configs.load import load_preset
from configs.schema import CaptionJob
from zoo import demo_videos
from zoo.demo_output import check
from zoo.world.motion import PROMPTS, render_motion
from zoo.world.scene import split_of


def test_files_are_lossy_mp4_of_motions_outside_the_training_set(tmp_path: Path) -> None:
    motions = demo_videos.write_videos(tmp_path / "videos", 2, 3)
    assert sorted(path.name for path in (tmp_path / "videos").iterdir()) == list(motions)
    codecs = []
    for name, motion in motions.items():
        assert split_of(motion.scene) == "demo"
        with av.open(str(tmp_path / "videos" / name)) as file:
            codecs.append(file.streams.video[0].codec_context.name)
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
            assert float(file.streams.video[0].average_rate) == demo_videos.FPS
        drawn = render_motion(motion, demo_videos.DURATION_S * demo_videos.FPS, demo_videos.SIZE_PX)
        assert len(frames) == len(drawn) == 36
        for shown, true in ((frames[0], drawn[0]), (frames[-1], drawn[-1])):
            error = np.abs(shown.astype(int) - np.asarray(true).astype(int)).mean()
            assert 0 < error < 12
    assert codecs == ["mpeg4", "h264"]


def test_the_presets_ask_what_the_demo_checks() -> None:
    for name in demo_videos.CONFIGS.values():
        assert load_preset(CaptionJob, name).prompt.text == PROMPTS[demo_videos.PHRASING]


def test_lost_ids_errors_and_differing_texts_are_reported() -> None:
    def row(text: str, error: str = "") -> dict[str, Any]:
        return {"error_type": error, "generated_text": text}

    good, wanted = {"a": row("x"), "b": row("y")}, {"a": "", "b": ""}
    assert check("videos", {"speculative": good, "plain": good}, wanted) == []
    other = good | {"b": row("z")}
    assert check("videos", {"speculative": good, "plain": other}, wanted) == ["videos: results differ between the runs"]
    failed = good | {"b": row("", "broken_video")}
    assert "('b', 'broken_video')" in check("videos", {"plain": failed}, wanted)[0]
    assert check("videos", {"plain": failed}, wanted | {"b": "broken_video"}) == []
    assert check("videos", {"plain": good}, wanted | {"c": ""}) == [
        "videos, plain: rows are not as planned: [('c', '')]"
    ]
