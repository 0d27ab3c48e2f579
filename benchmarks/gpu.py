"""This engine on a GPU, inside ten minutes, true shapes without true checkpoints.

    python -m benchmarks.gpu                        # writes results/gpu.json; then python -m benchmarks.tables
    python -m benchmarks.gpu --device cpu --tiny    # all of the code but the device; nothing is written

Sections, in this order, each with a time of its own: how fast the device copies; attention in two parts beside one
mask; a 7B target and its drafter, made by inflation of the zoo's text pair on the device and checked against it; plain
decoding and chains at several batch sizes, eager and replayed; images in LlamaGen's XL shape; long visual contexts with
forced acceptance. A section for which no time is left is skipped, and a failed one named; the others go on. Needs torch
2.11 or newer and transformers, and neither Ray nor pydantic.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_decoding import measure_decoding
from benchmarks.gpu_images import measure_images
from benchmarks.gpu_kernels import copy_bytes_per_s, measure_attention
from benchmarks.gpu_long import measure_long
from benchmarks.gpu_models import TextPair, make_image_models, make_text_pair
from benchmarks.gpu_sizes import FULL, TINY, Sizes
from benchmarks.gpu_tables import gpu_table

RESULTS = Path(__file__).parent / "results" / "gpu.json"
MAX_S = 560.0
MIN_TORCH = (2, 11)
BUDGETS_S = {"copy": 15.0, "attention": 30.0, "pair": 90.0, "decoding": 240.0, "images": 90.0, "long": 95.0}
"""Of each section; what one does not use is left to those after it."""
NEEDS = {"decoding": ("copy", "pair"), "long": ("pair",)}
"""Sections without which another cannot run."""


class Sections:
    """What was measured so far, in which time, and what was not and why."""

    def __init__(self, max_s: float) -> None:
        self._began_s = time.monotonic()
        self._max_s = max_s
        self._ends_s = self._began_s
        self.found: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def run(self, name: str, measure: Callable[[], Any]) -> None:
        """One section, unless something that it needs is missing or no time is left."""
        lacking = [one for one in NEEDS.get(name, ()) if one not in self.found]
        now = time.monotonic()
        self._ends_s = min(max(now, self._ends_s) + BUDGETS_S[name], self._began_s + self._max_s)
        if lacking:
            self.skipped[name] = f"it needs {', '.join(lacking)}"
        elif now >= self._began_s + self._max_s:
            self.skipped[name] = f"the {self._max_s:.0f} s of the whole run were used up"
        else:
            print(f"{name} …", file=sys.stderr, flush=True)
            try:
                self.found[name] = measure()
            except Exception as error:  # the sections after it are worth their time
                traceback.print_exc()
                self.failed[name] = f"{type(error).__name__}: {error}"
            self.seconds[name] = time.monotonic() - now
        for told in (self.skipped.get(name), self.failed.get(name)):
            if told:
                print(f"{name} has no figures: {told}", file=sys.stderr, flush=True)

    def has_time(self) -> bool:
        """Whether the section that runs may begin something more."""
        return time.monotonic() < self._ends_s


def measure(sizes: Sizes, device: torch.device, max_s: float) -> dict[str, Any]:
    """All sections."""
    sections = Sections(max_s)
    pairs: list[TextPair] = []

    def make_pair() -> dict[str, Any]:
        pairs.append(make_text_pair(sizes, device))
        return pairs[0].told

    def decode() -> dict[str, Any]:
        rows, left_out = measure_decoding(pairs[0], sizes, device, sections.found["copy"], sections.has_time)
        return {"rows": rows, "left_out": left_out}

    def draw() -> dict[str, Any]:
        images = make_image_models(sizes, device)
        rows, left_out = measure_images(images, sizes, sections.has_time)
        return {"model": images.told, "rows": rows, "left_out": left_out}

    def look() -> dict[str, Any]:
        rows, left_out = measure_long(pairs[0], sizes, sections.has_time)
        return {"rows": rows, "left_out": left_out}

    sections.run("copy", lambda: copy_bytes_per_s(sizes, device))
    sections.run("attention", lambda: measure_attention(sizes, device))
    sections.run("pair", make_pair)
    sections.run("decoding", decode)
    sections.run("images", draw)
    sections.run("long", look)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU",
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": sizes.dtype,
        "gamma": sizes.gamma,
        "seconds": sections.seconds,
        "skipped": sections.skipped,
        "failed": sections.failed,
        **sections.found,
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; nothing is written")
    parser.add_argument("--max-s", type=float, default=MAX_S, help=f"no section is begun after that ({MAX_S:.0f})")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU runs this with --tiny only; its own benchmarks are benchmarks.engine and benchmarks.peers")
    return options


def refusal(device: str) -> str:
    """Why nothing can be measured here; empty where it can."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        return (
            f"this needs torch {'.'.join(map(str, MIN_TORCH))} or newer, and this interpreter has {torch.__version__}"
        )
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU was found: this benchmark needs one CUDA device (--device cpu --tiny runs its code without one)"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Measure; see the module's docstring. Returns 0, 1 where a section failed, and 2 where nothing can be measured."""
    options = parse(arguments)
    if told := refusal(options.device):
        print(f"error: {told}", file=sys.stderr)
        return 2
    found = measure(TINY if options.tiny else FULL, torch.device(options.device), options.max_s)
    print(gpu_table(found))
    if options.device == "cuda" and not options.tiny:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
