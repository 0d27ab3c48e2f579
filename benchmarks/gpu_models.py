"""The models of `benchmarks.gpu`, made on the device itself, and the methods that run over them.

The zoo's pairs in true shapes, by inflation; nothing is timed before an inflated model has said what its source says.
Nothing here or behind it needs Ray or pydantic: a machine with a GPU may have neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.gpu_clock import WatchedRecorder
from benchmarks.gpu_sizes import Sizes
from benchmarks.inflate import inflate
from benchmarks.inflate_check import Difference, compare, zoo_inputs
from benchmarks.inflate_files import load
from benchmarks.inflate_images import compare_gpts, inflate_gpt
from benchmarks.inflate_shapes import InflationError, Shape
from benchmarks.peer_process import Work
from benchmarks.peer_reference import make_reference
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import Acceptance, Method
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain
from models.backends.cuda.graphs import CapturedDecoder, CudaRecorder, Recorder
from models.contract import TargetModel
from models.inputs.processing import FrontEnd
from models.llamagen.checkpoints import load_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.target import LlamaGenTarget
from models.loading.checkpoints import DTYPES, CheckpointRef, read_config, read_processor
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.text_samples import held_out_prompts

TARGET, DRAFTER, IMAGES = (CHECKPOINTS / name for name in ("text_target", "text_drafter", "image_class_target"))
SEED = 7
CPU_THREADS = 8
"""For the reference, which the small source makes on the CPU."""
EAGER, CAPTURED = "eager", "captured"


class RunAgain:
    """A recorder for devices without graphs, so that buffers and their filling are exercised there too."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        out = run()

        def replay() -> None:
            out.copy_(run())

        return out, replay


def recorder(device: torch.device) -> Recorder:
    """What records work on this device."""
    return CudaRecorder(device) if device.type == "cuda" else RunAgain()


def let_capture(model: TargetModel) -> None:
    """Replay this model's steps from now on."""
    if not model.capture():
        model._run = CapturedDecoder(model.decoder, RunAgain())
    assert isinstance(model._run, CapturedDecoder)
    model._run._recorder = WatchedRecorder(model._run._recorder, next(model.decoder.parameters()).device)


def watched_of(*models: TargetModel) -> list[WatchedRecorder]:
    """What times the replays of these models; none of those that run eager."""
    recorders = [getattr(model._run, "_recorder", None) for model in models]
    return [one for one in recorders if isinstance(one, WatchedRecorder)]


@dataclass(frozen=True)
class TextPair:
    """Target and drafter by how their steps run, over the same weights; prompts, and what the target says to them."""

    targets: dict[str, Target]
    drafters: dict[str, Target]
    prompts: list[str]
    reference: list[dict[str, Any]]
    max_context_tokens: int
    told: dict[str, Any]


def make_text_pair(sizes: Sizes, device: torch.device) -> TextPair:
    """Both models on the device, checked.

    Raises:
        InflationError: one of them is not its source.
    """
    start = time.perf_counter()
    target, target_check = grow(TARGET, sizes.target, sizes, device)
    drafter, drafter_check = grow(DRAFTER, sizes.drafter, sizes, device)
    made_s = time.perf_counter() - start
    prompts = held_out_prompts(max(sizes.batches) * sizes.requests_per_slot, SEED)
    front_end = front_end_of(TARGET)
    ids = [front_end.encode(text, ())["input_ids"][0].tolist() for text in prompts]
    longest = max(map(len, ids)) + sizes.max_new_tokens
    work = Work(
        str(TARGET), "", "float32", min(CPU_THREADS, torch.get_num_threads()), sizes.gamma, max(sizes.batches),
        longest, sizes.max_new_tokens, False, prompts, ids,
    )  # fmt: skip
    reference = make_reference(work)
    told = {
        "made_and_checked_s": made_s,
        "target": asdict(sizes.target) | {"num_parameters": target.num_parameters(), "check": asdict(target_check)},
        "drafter": asdict(sizes.drafter) | {"num_parameters": drafter.num_parameters(), "check": asdict(drafter_check)},
    }
    targets, drafters = both_ways(target, TARGET), both_ways(drafter, DRAFTER)
    return TextPair(targets, drafters, prompts, reference, longest, told)


def grow(folder: Path, shape: Shape, sizes: Sizes, device: torch.device) -> tuple[PreTrainedModel, Difference]:
    """A checkpoint of the zoo in another shape, made on the device, and how it compares with its source there.

    Raises:
        InflationError: outputs differ by more than rounding.
    """
    dtype = DTYPES[sizes.dtype]
    source: Any = load(folder, dtype).to(device)
    grown = inflate(source, shape, SEED, dtype, device)
    found = compare(source, grown, zoo_inputs(folder, sizes.checked, SEED), sizes.max_new_tokens)
    if found.fault:
        raise InflationError(f"{folder.name} in the shape {shape} is another model: {found.fault}")
    return grown, found


def front_end_of(folder: Path) -> FrontEnd:
    """A checkpoint's own tokenizer."""
    ref = CheckpointRef(str(folder))
    return FrontEnd(read_processor(ref, read_config(ref)))


def both_ways(model: PreTrainedModel, folder: Path) -> dict[str, Target]:
    """Two models of the same weights: one whose steps run as they are, one whose steps are replayed."""
    found = {step: Target(model, front_end_of(folder), folder.name) for step in (EAGER, CAPTURED)}
    let_capture(found[CAPTURED])
    return found


def plain() -> Method:
    """The parts of plain decoding."""
    return Method(NoDrafter(), Chain(1), Exact())


def drafted(drafter: Any, target: Any, gamma: int, rule: Acceptance | None = None) -> Method:
    """The parts of chains of `gamma`, accepted exactly unless another rule is given."""
    return Method(ModelDrafter(drafter, [Full()], target.vocab_size), Chain(gamma), rule or Exact())


@dataclass(frozen=True)
class ImageModels:
    """An image model by how its steps run, and how it compares with its source at the source's own grid."""

    models: dict[str, LlamaGenTarget]
    num_classes: int
    told: dict[str, Any]


def make_image_models(sizes: Sizes, device: torch.device) -> ImageModels:
    """LlamaGen's shape with images of `sizes.grid`², which its weights do not depend on.

    Raises:
        InflationError: in single precision it is not its source.
    """
    source = load_gpt(CheckpointRef(str(IMAGES)), "float32", device)
    grown = inflate_gpt(source, sizes.image, SEED)
    found = compare_gpts(source, grown, 1, SEED)
    if found.fault:
        raise InflationError(f"{IMAGES.name} in the shape {sizes.image} is another model: {found.fault}")
    larger = Gpt(replace(grown.shape, grid=sizes.grid))
    larger.load_state_dict(grown.state_dict())
    larger = larger.requires_grad_(False).eval().to(device, DTYPES[sizes.dtype])
    models = {step: LlamaGenTarget(larger, guided=True, name=IMAGES.name) for step in (EAGER, CAPTURED)}
    let_capture(models[CAPTURED])
    told = asdict(sizes.image) | {
        "grid": sizes.grid,
        "num_parameters": sum(one.numel() for one in larger.parameters()),
        "check": asdict(found),
    }
    classes = source.shape.num_classes
    assert classes is not None, IMAGES
    return ImageModels(models, classes, told)


def peak_bytes(device: torch.device) -> int:
    """The most memory that was in use on the device since the last time; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    most = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return most


def lengths_between(low: int, high: int, number: int) -> Sequence[int]:
    """Row lengths spread evenly between two."""
    return [low + (high - low) * place // max(1, number - 1) for place in range(number)]
