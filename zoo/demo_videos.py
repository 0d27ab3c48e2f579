"""Runs the demo's videos: held-out motions as real mp4 files, captioned speculatively and plainly.

Writes the files, runs both jobs, and compares captions with motions. The caller starts Ray.
"""

from __future__ import annotations

from pathlib import Path

import av
from PIL import Image

from configs.load import load_preset
from configs.schema import CaptionJob
from jobs import caption
from pipeline.run.plan import make_plan
from zoo.demo_output import Rows, check, read_rows, show_caption
from zoo.world.motion import Motion, draw_motion, render_motion, states, write_motion
from zoo.world.scene import scene_rng

NUM_VIDEOS = 16
SEED = 20_261
DURATION_S, FPS, SIZE_PX = 3, 12, 192
CODECS = ("mpeg4", "libx264")
"""Codecs that the files use in turn, lossy at their default quality."""
PHRASING = "describe"
"""Key of `zoo.world.motion.PROMPTS` that the presets use."""
NUM_SHOWN = 3
CONFIGS = {"speculative": "zoo_video_sd", "plain": "zoo_video_plain"}


def run(out: Path) -> list[str]:
    """Write the files below `out`, caption them twice and print the results; return the failures. Raises ConfigError if
    a job is refused."""
    motions = write_videos(out / "source/videos", NUM_VIDEOS, SEED)
    print(
        f"wrote {len(motions)} mp4 files of {DURATION_S} s into {out}/source/videos, by {' and '.join(CODECS)} in turn"
    )
    results: dict[str, Rows] = {}
    for run_name, preset in CONFIGS.items():
        where = out / run_name / "videos"
        config = load_preset(CaptionJob, preset, (f"source.path={out}/source/videos", f"sink.path={where}"))
        print(f"{run_name}, mp4 files, {config.method.label}", flush=True)
        caption.run(make_plan(config))
        rows = read_rows(where, ["generated_text"])
        results[run_name] = {sample_id.partition("#")[0]: row for sample_id, row in rows.items()}
    print()
    texts = {name: results["speculative"].get(name, {}).get("generated_text", "") for name in motions}
    for name, motion in list(motions.items())[:NUM_SHOWN]:
        print(name)
        show_caption(write_motion(motion, PHRASING, scene_rng("demo", SEED, 0)), texts[name])
    print()
    right = sum(states(motion, PHRASING, texts[name]) for name, motion in motions.items())
    print(f"videos      {right} of {len(motions)} captions say what moved from where to where, and what stayed")
    problems = check("videos", results, dict.fromkeys(motions, ""))
    if not problems:
        print("texts       equal in both runs, video by video")
    return problems


def write_videos(folder: Path, count: int, seed: int) -> dict[str, Motion]:
    """Draw motions of the split `demo` and write one mp4 file of each; return the motions by file name."""
    folder.mkdir(parents=True)
    motions = {}
    for index in range(count):
        motion = draw_motion(scene_rng("demo", seed, index), "demo")
        name = f"motion-{index:02}.mp4"
        write_video(folder / name, render_motion(motion, DURATION_S * FPS, SIZE_PX), CODECS[index % len(CODECS)])
        motions[name] = motion
    return motions


def write_video(path: Path, frames: list[Image.Image], codec: str) -> None:
    """Encode frames as an mp4 file."""
    with av.open(str(path), "w") as output:
        stream = output.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_image(frame)))
        output.mux(stream.encode())
