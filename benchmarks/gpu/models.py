"""Makes the models of `benchmarks.gpu`: inflates the zoo's pairs on the device and compares them with their sources.

Nothing imported here needs Ray or pydantic.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.clock import WatchedRecorder
from benchmarks.harness.engines import encode, front_end_of
from benchmarks.harness.process import Work
from benchmarks.inflate.check import compare, zoo_inputs
from benchmarks.inflate.folders import load
from benchmarks.inflate.images import compare_gpts, inflate_gpt
from benchmarks.inflate.model import inflate
from benchmarks.inflate.shapes import Shape
from benchmarks.peers.work import make_reference
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import Acceptance, Method
from decoding.drafters import ModelDrafter
from decoding.trees import Chain
from models.backends.cuda.graphs import CapturedDecoder, CudaRecorder
from models.backends.recorder import KernelRecorder, Out
from models.contract import TargetModel
from models.llamagen.checkpoints import load_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.target import LlamaGenTarget
from models.loading.checkpoints import DTYPES, CheckpointRef
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text import held_out_prompts

TARGET, DRAFTER, IMAGES = (CHECKPOINTS / name for name in ("text_target", "text_drafter", "image_class_target"))
SEED = 7
CPU_THREADS = 8
"""Threads of the reference, which the source model decodes on the CPU."""
EAGER, CAPTURED, FUSED = "eager", "captured", "fused"


class RunAgain:
    """A recorder for devices without CUDA graphs, which runs the function again into the same buffer."""

    is_recording = False

    def run_beside(self, run: Callable[[], Out]) -> Out:
        return run()

    def record(self, run: Callable[[], Out]) -> tuple[Out, Callable[[], None]]:
        out: Any = run()

        def replay() -> None:
            out.copy_(run())

        return out, replay


def recorder(device: torch.device) -> KernelRecorder:
    return CudaRecorder(device) if device.type == "cuda" else RunAgain()


def let_capture(model: TargetModel, fuses: bool = False) -> None:
    """Capture and replay this model's steps from now on, with timed replays."""
    if not model.capture(fuses):
        model._run = CapturedDecoder(model.decoder, RunAgain(), fuses, "eager")
    assert isinstance(model._run, CapturedDecoder)
    model._run._recorder = WatchedRecorder(model._run._recorder, next(model.decoder.parameters()).device)


def watched_of(*models: TargetModel) -> list[WatchedRecorder]:
    """Return the recorders of these models that time replays; none for eager models."""
    recorders = [getattr(model._run, "_recorder", None) for model in models]
    return [recorder for recorder in recorders if isinstance(recorder, WatchedRecorder)]


@dataclass(frozen=True)
class TextPair:
    """Target and drafter, each for all steps over the same weights; prompts and the target's reference outputs."""

    targets: dict[str, Target]
    drafters: dict[str, Target]
    prompts: list[str]
    prompt_ids: list[list[int]]
    reference: list[dict[str, Any]]
    max_context_tokens: int
    facts: dict[str, Any]


def make_text_pair(sizes: Sizes, device: torch.device) -> TextPair:
    """Make both models on the device; raise InflationError if one differs from its source."""
    start = time.perf_counter()
    target, target_facts = grow(TARGET, sizes.target, sizes, device)
    drafter, drafter_facts = grow(DRAFTER, sizes.drafter, sizes, device)
    facts = {"made_and_checked_s": time.perf_counter() - start, "target": target_facts, "drafter": drafter_facts}
    prompts = held_out_prompts(max(sizes.batches) * sizes.requests_per_slot, SEED)
    ids = encode(front_end_of(TARGET), prompts)
    longest = max(map(len, ids)) + sizes.max_new_tokens
    work = Work(
        str(TARGET), "", "float32", min(CPU_THREADS, torch.get_num_threads()), sizes.gamma, max(sizes.batches),
        longest, sizes.max_new_tokens, False, prompts, ids,
    )  # fmt: skip
    targets, drafters = both_ways(target, TARGET), both_ways(drafter, DRAFTER)
    for model in targets.values():
        if model.backend.is_asynchronous:
            model.prefetch_prompts()  # as jobs do
    return TextPair(targets, drafters, prompts, ids, make_reference(work), longest, facts)


def grow(folder: Path, shape: Shape, sizes: Sizes, device: torch.device) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return an inflated checkpoint of the zoo on the device, and its sizes and comparison with the source there."""
    dtype = DTYPES[sizes.dtype]
    source: Any = load(folder, dtype).to(device)
    grown = inflate(source, shape, SEED, dtype, device)
    difference = compare(source, grown, zoo_inputs(folder, sizes.checked, SEED), sizes.max_new_tokens)
    check = asdict(difference.require_equal(folder.name, shape))
    return grown, asdict(shape) | {"num_parameters": grown.num_parameters(), "check": check}


def both_ways(model: PreTrainedModel, folder: Path) -> dict[str, Target]:
    """Return an eager and two captured models over the same weights, of which one has fused layers.

    Fusing merges weights in memory, so it precedes all captures.
    """
    targets = {step: Target(model, front_end_of(folder), folder.name) for step in (EAGER, CAPTURED, FUSED)}
    let_capture(targets[FUSED], fuses=True)
    let_capture(targets[CAPTURED])
    return targets


def drafted(drafter: Any, target: Any, gamma: int, rule: Acceptance | None = None) -> Method:
    """Return chains of `gamma` drafts, with exact acceptance by default."""
    return Method(ModelDrafter(drafter, [Full()], target.vocab_size), Chain(gamma), rule or Exact())


@dataclass(frozen=True)
class ImageModels:
    """An image model, eager and captured, and its comparison with the source at the source's own grid."""

    models: dict[str, LlamaGenTarget]
    num_classes: int
    facts: dict[str, Any]


def make_image_models(sizes: Sizes, device: torch.device) -> ImageModels:
    """Make the image models with `sizes.grid`² codes per image; the weights do not depend on the grid."""
    source = load_gpt(CheckpointRef(str(IMAGES)), "float32", device)
    grown = inflate_gpt(source, sizes.image, SEED)
    difference = compare_gpts(source, grown, 1, SEED).require_equal(IMAGES.name, sizes.image)
    larger = Gpt(replace(grown.shape, grid=sizes.grid))
    larger.load_state_dict(grown.state_dict())
    larger = larger.requires_grad_(False).eval().to(device, DTYPES[sizes.dtype])
    models = {step: LlamaGenTarget(larger, guided=True, name=IMAGES.name) for step in (EAGER, CAPTURED)}
    let_capture(models[CAPTURED])
    facts = asdict(sizes.image) | {
        "grid": sizes.grid,
        "num_parameters": sum(parameter.numel() for parameter in larger.parameters()),
        "check": asdict(difference),
    }
    classes = source.shape.num_classes
    assert classes is not None, IMAGES
    return ImageModels(models, classes, facts)


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory on the device since the last call; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most
