"""Quality of the video pair: right captions and attributes on held-out clips, and agreement of the two models.

`python -m zoo.video_quality` measures the shipped pair and writes zoo/video_quality.json; with `--table` it prints the
table of the committed file.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from decoding import Completion, Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.inputs.clip import Clip
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.allocation import keep_memory
from zoo.pair import CHECKPOINTS
from zoo.video_pair import NUM_FRAMES
from zoo.world.motion import PROMPTS, Motion, draw_motion, render_motion, stated, states, write_motion
from zoo.world.scene import scene_rng

QUALITY_JSON = Path(__file__).parent / "video_quality.json"
NUM_DRAFTED = 5
CLIP_S = 3.0
RENDERED_PX = 192
SLOTS = 25

ROWS = (
    ("captions right, target", "target_captions_right"),
    ("captions right, drafter", "drafter_captions_right"),
    ("stated attributes right, target", "target_attributes_right"),
    ("stated attributes right, drafter", "drafter_attributes_right"),
    ("mean acceptance length, 5 drafted", "mean_acceptance_length"),
    ("mean tokens of a caption", "mean_caption_tokens"),
)


def held_out_clips(num: int, seed: int) -> list[tuple[Motion, str, Clip]]:
    """Held-out motions, the phrasing that each is asked for, and eight frames of three seconds."""
    drawn = []
    for index in range(num):
        rng = scene_rng("held_out", seed, index)
        motion = draw_motion(rng, "held_out")
        frames = np.stack([np.asarray(frame) for frame in render_motion(motion, NUM_FRAMES, RENDERED_PX)])
        times_s = tuple(CLIP_S * (frame + 0.5) / NUM_FRAMES for frame in range(NUM_FRAMES))
        drawn.append((motion, list(PROMPTS)[index % len(PROMPTS)], Clip(frames, times_s, NUM_FRAMES / CLIP_S)))
    return drawn


def requests(model: Target, clips: list[tuple[Motion, str, Clip]]) -> list[Request]:
    """One greedy request for each clip."""
    wanted = []
    for index, (_, phrasing, clip) in enumerate(clips):
        content = [{"type": "video"}, {"type": "text", "text": PROMPTS[phrasing]}]
        prompt = model.front_end.render([{"role": "user", "content": content}])
        wanted.append(Request(f"clip-{index}", prompt, (), Sampling(max_new_tokens=120), videos=(clip,)))
    return wanted


def attributes_right(motion: Motion, phrasing: str, text: str) -> tuple[int, int]:
    """Attribute words at the positions of the true caption, and the number of its attribute words."""
    true = stated(write_motion(motion, phrasing, scene_rng("held_out", 0, 0)))
    said = stated(text)
    return sum(one == other for one, other in zip(true, said)), max(len(true), len(said))


def caption(model: Target, clips: list[tuple[Motion, str, Clip]], drafter: Target | None = None) -> list[Completion]:
    """Greedy captions of clips, in their order: plain, or drafted by a chain.

    Raises:
        RuntimeError: a clip failed.
    """
    method = Method(NoDrafter(), Chain(1), Exact())
    if drafter is not None:
        method = Method(ModelDrafter(drafter, [Full()], model.vocab_size), Chain(NUM_DRAFTED), Exact())
    done = {one.sample_id: one for one in Engine(model, method, SLOTS, 512).run(requests(model, clips))}
    failed = [one.error for one in done.values() if one.error]
    if failed:
        raise RuntimeError(f"{len(failed)} clips failed, the first with: {failed[0]}")
    return [done[f"clip-{index}"] for index in range(len(clips))]


def measure(folder: Path = CHECKPOINTS, num: int = 300, seed: int = 0) -> dict[str, float]:
    """Measure a saved pair; the result is what zoo/video_quality.json holds.

    Raises:
        RuntimeError: a clip failed, or a speculative caption is not the plain one.
    """
    clips = held_out_clips(num, seed)
    pair = {
        role: Target.load(CheckpointRef(str(folder / f"video_{role}")), "float32") for role in ("target", "drafter")
    }
    plain = {role: caption(model, clips) for role, model in pair.items()}
    found: dict[str, float] = {"num_clips": num}
    for role, done in plain.items():
        asked = [(motion, phrasing, one.text) for (motion, phrasing, _), one in zip(clips, done, strict=True)]
        counts = [attributes_right(*one) for one in asked]
        found[f"{role}_captions_right"] = sum(states(*one) for one in asked) / num
        found[f"{role}_attributes_right"] = sum(one for one, _ in counts) / sum(whole for _, whole in counts)
    found["mean_caption_tokens"] = sum(len(one.token_ids) for one in plain["target"]) / num
    drafted = caption(pair["target"], clips, pair["drafter"])
    if [one.text for one in drafted] != [one.text for one in plain["target"]]:
        raise RuntimeError("speculative captions differ from plain ones")
    steps = sum(one.telemetry.num_spec_steps for one in drafted)
    found["mean_acceptance_length"] = 1 + sum(one.telemetry.num_accepted_draft_tokens for one in drafted) / steps
    return {name: round(value, 4) for name, value in found.items()}


def quality_table(measured: dict[str, float]) -> str:
    """The measured numbers as a Markdown table."""
    lines = ["| measured on held-out clips | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {said} | {measured[key]:.3f} |" for said, key in ROWS)])


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zoo.video_quality", description="Measure the video pair.")
    parser.add_argument("--table", action="store_true", help="print the table of the committed file, measure nothing")
    parser.add_argument("--checkpoints", type=Path, default=CHECKPOINTS)
    parser.add_argument("--json", type=Path, default=QUALITY_JSON, help="file that is read or written")
    parser.add_argument("--num", type=int, default=300, help="clips to measure on")
    options = parser.parse_args(arguments)
    if not options.table:
        keep_memory()
        options.json.write_text(json.dumps(measure(options.checkpoints, options.num), indent=1) + "\n")
    print(quality_table(json.loads(options.json.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
