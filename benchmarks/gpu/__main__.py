"""Measures this engine on a GPU within eight minutes, in the shapes of published models with inflated checkpoints.

Sections that a run did not measure keep the figures of the last run that did, which `runs` describes.

    python -m benchmarks.gpu                        # writes results/gpu.json; then python -m benchmarks.tables
    python -m benchmarks.gpu --device cpu --tiny    # runs the code without a GPU; nothing is written

Sections: copies and GEMMs of the device; attention by the tree kernel and with one mask; a 7B target and its drafter,
inflated from the zoo's text pair and compared with it; plain decoding and chains, eager, captured and fused; prefills;
transformers' `generate` over the same weights; images in LlamaGen's XL shape; long visual contexts at forced
acceptance. Needs torch 2.11, transformers and llguidance, and neither Ray nor pydantic.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.gpu.decoding import measure_decoding, measure_fused, measure_images, measure_long
from benchmarks.gpu.generate import COMPILED, measure_generate
from benchmarks.gpu.kernels import copy_bytes_per_s, gemm_flop_per_s, measure_attention
from benchmarks.gpu.models import EAGER, TextPair, make_image_models, make_text_pair
from benchmarks.gpu.prefill import measure_prefill
from benchmarks.gpu.sizes import FULL, TINY, Sizes
from benchmarks.harness.results import command_line, cores, progress, read_results, results_file, write_results
from benchmarks.tables.parts import show

RESULTS = results_file("gpu")
TEXT = ("pair", "fused", "decoding", "generate", "generate_compiled")
"""Sections whose speeds are compared with each other, so they are of one run."""
TABLES = tuple(f"gpu_{name}" for name in ("attention", "pair", "decoding", "prefill", "generate", "images", "long"))
MAX_S = 480.0
"""No section starts after this time."""
MIN_TORCH = (2, 11)
BUDGETS_S = {
    "copy": 5.0,
    "gemm": 5.0,
    "attention": 15.0,
    "pair": 40.0,
    "fused": 120.0,
    "prefill": 30.0,
    "generate": 50.0,
    "long": 60.0,
    "images": 35.0,
    "decoding": 75.0,
    "generate_compiled": 45.0,
}
"""Time limits of the sections in seconds; unused time passes to later sections."""
FACTS = ("device", "cores", "torch", "transformers", "seconds")
"""Properties of a run that its sections keep."""
NEEDS = {
    "decoding": ("copy", "pair"),
    "generate": ("pair",),
    "generate_compiled": ("pair",),
    "long": ("pair",),
    "fused": ("copy", "pair"),
    "prefill": ("gemm", "pair"),
}
"""Section → the sections whose results it needs."""


def merge(earlier: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a run with those sections of earlier runs that it did not measure.

    TEXT is replaced as a whole, once `fused` was measured. `runs` holds the device and versions of each section.
    """
    facts = {name: results[name] for name in FACTS}
    old = {name for name in BUDGETS_S if name in earlier and name not in results}
    if "fused" in results:
        old -= set(TEXT)
    elif "fused" in earlier:
        old |= set(TEXT) & set(earlier)
    new = set(BUDGETS_S) & set(results) - old
    before = earlier.get("runs") or {name: {fact: earlier[fact] for fact in FACTS} for name in old}
    skipped = {name: reason for name, reason in results["skipped"].items() if name not in old}
    failed = {name: reason for name, reason in results["failed"].items() if name not in old}
    return {
        **{name: value for name, value in results.items() if name not in BUDGETS_S},
        "skipped": skipped,
        "failed": failed,
        "runs": {name: facts if name in new else before[name] for name in BUDGETS_S if name in new | old},
        **{name: (results if name in new else earlier)[name] for name in BUDGETS_S if name in new | old},
    }


class Sections:
    """Results and times of the finished sections, and the reasons for skipped and failed ones."""

    def __init__(self, max_s: float) -> None:
        self._began_s = self._ends_s = time.monotonic()
        self._max_s = max_s
        self.results: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.skipped: dict[str, str] = {}
        self.failed: dict[str, str] = {}

    def run(self, name: str, measure: Callable[[], Any]) -> None:
        """Run one section, unless a result that it needs is missing or no time is left."""
        missing = [section for section in NEEDS.get(name, ()) if section not in self.results]
        now = time.monotonic()
        self._ends_s = min(max(now, self._ends_s) + BUDGETS_S[name], self._began_s + self._max_s)
        if missing:
            self.skipped[name] = f"it needs {', '.join(missing)}"
        elif now >= self._began_s + self._max_s:
            self.skipped[name] = f"the {self._max_s:.0f} s of the whole run were used up"
        else:
            progress(f"{name} …")
            try:
                self.results[name] = measure()
            except Exception as error:  # later sections still run
                traceback.print_exc()
                self.failed[name] = f"{type(error).__name__}: {error}"
            self.seconds[name] = time.monotonic() - now
        if reason := self.skipped.get(name) or self.failed.get(name):
            progress(f"{name} has no figures: {reason}")

    def has_time(self) -> bool:
        """Return whether the current section may start another measurement."""
        return time.monotonic() < self._ends_s


def measure(
    sizes: Sizes, device: torch.device, max_s: float, save: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Run all sections; `save` receives the results so far after each."""
    sections = Sections(max_s)
    pairs: list[TextPair] = []

    def make_pair() -> dict[str, Any]:
        pairs.append(make_text_pair(sizes, device))
        return pairs[0].facts

    def draw() -> dict[str, Any]:
        images = make_image_models(sizes, device)
        return {"model": images.facts, **measure_images(images, sizes, sections.has_time)}

    measures: dict[str, Callable[[], Any]] = {
        "copy": lambda: copy_bytes_per_s(sizes, device),
        "gemm": lambda: gemm_flop_per_s(sizes, device),
        "attention": lambda: measure_attention(sizes, device),
        "pair": make_pair,
        "fused": lambda: measure_fused(pairs[0], sizes, sections.results["copy"], sections.has_time),
        "prefill": lambda: measure_prefill(pairs[0], sizes, sections.results["gemm"], sections.has_time),
        "generate": lambda: measure_generate(pairs[0], EAGER, sizes, sections.has_time),
        "long": lambda: measure_long(pairs[0], sizes, sections.has_time),
        "images": draw,
        "decoding": lambda: measure_decoding(pairs[0], sizes, sections.results["copy"], sections.has_time),
        "generate_compiled": lambda: measure_generate(pairs[0], COMPILED, sizes, sections.has_time),
    }
    results: dict[str, Any] = {}
    for name, run in measures.items():
        sections.run(name, run)
        results = {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU",
            "cores": len(cores()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": sizes.dtype,
            "gamma": sizes.gamma,
            "seconds": sections.seconds,
            "skipped": sections.skipped,
            "failed": sections.failed,
            **sections.results,
        }
        save(results)
    return results


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line("gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-seconds", type=float, default=MAX_S, help="no section starts after this time")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; nothing is written")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU runs this with --tiny only; its own benchmarks are benchmarks.engine and benchmarks.peers")
    return options


def refusal(device: str) -> str:
    """Return why nothing can be measured with this torch or device; empty if it can."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        return f"this needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, and this interpreter has {torch.__version__}"
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU was found: this benchmark needs one CUDA device (--device cpu --tiny runs its code without one)"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Return 0, 1 if a section failed, and 2 if nothing can be measured."""
    options = parse(arguments)
    if reason := refusal(options.device):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    writes = options.device == "cuda" and not options.tiny
    earlier = read_results(RESULTS) if writes and RESULTS.exists() else {}
    save = (lambda results: write_results(RESULTS, merge(earlier, results))) if writes else (lambda _: None)
    results = measure(TINY if options.tiny else FULL, torch.device(options.device), options.max_seconds, save)
    print(show("gpu", results, *TABLES))
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
