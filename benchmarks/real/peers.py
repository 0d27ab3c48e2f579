"""Compares this engine with transformers and vLLM on the pretrained pairs: plain decoding, n-grams, a drafter."""

from __future__ import annotations

import argparse
import sys

from actors.loading.pair import load
from benchmarks.harness.engines import Image
from benchmarks.harness.markdown import Results
from benchmarks.harness.process import PeerError
from benchmarks.harness.results import machine
from benchmarks.peers.compare import compare
from benchmarks.peers.environment import EnvironmentRefused
from benchmarks.peers.rounds import CONTENDERS, ENGINE, Cell, Contender
from benchmarks.peers.work import write_work
from benchmarks.real import text, vision_settings
from zoo.real_vision.quality import draw_asked, requests_of

SCENES = ("engine_plain", "engine_chain", "generate_eager")
"""vLLM's models that read images need torchvision, which has no build for the CPU builds of torch that its environment
takes."""
ON_TEXT = (
    Contender("engine_lookup", "draftfleet, n-grams", "", ENGINE, "lookup"),
    *(
        one
        for one in CONTENDERS
        if one.mode in ("plain", "eager", "compiled", "ngram")  # those without a drafter
    ),
)
ON_SCENES = (ON_TEXT[0], *(one for one in CONTENDERS if one.name in SCENES))
CELLS = (Cell(1, 8, 3), Cell(8, 24, 3), Cell(32, 64, 3))
LAUNCHES = 1
MAX_NEW_TOKENS = 64
PAIRS = {"text": ON_TEXT, "vision": ON_SCENES}
"""Pair → contenders."""


def inputs_of(pair: str, num: int) -> tuple[tuple[str, str], list[str], list[Image]]:
    """Return the folders of target and drafter (or ""), and `num` rendered prompts with their images, if any."""
    if pair == "text":
        loaded = load(text.job_of("plain", "bfloat16"))
        return (loaded.config.model.target.path, ""), text.read_prompts(loaded, num), []
    loaded = load(vision_settings.job_of(vision_settings.settings()["plain"], "bfloat16"))
    requests = requests_of(loaded.target, draw_asked("held_out", num, vision_settings.SEED))
    folders = (loaded.config.model.target.path, str(vision_settings.DRAFTERS["weak"]))
    return folders, [one.prompt for one in requests], [one.images[0] for one in requests]


def compare_engines(options: argparse.Namespace) -> Results | None:
    """Measure all engines on the pair `options.peers` in bfloat16, greedily; None if one could not run, after a
    message."""
    about, most = machine(), max(one.batch for one in CELLS)
    folders, prompts, images = inputs_of(options.peers, max(cell.num_requests for cell in CELLS))
    limits = (MAX_NEW_TOKENS, most)
    work = write_work(folders, "bfloat16", options.threads, prompts, *limits, options.scratch, images)
    try:
        found = compare(work, PAIRS[options.peers], CELLS, LAUNCHES, options.scratch)
    except (PeerError, EnvironmentRefused) as error:
        print(f"real: {error}", file=sys.stderr)
        return None
    return {"machine": about, "threads": options.threads, **found}
