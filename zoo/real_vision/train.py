"""Trains the target of the vision pair on a CPU, stage by stage: `python -m zoo.real_vision.train STAGE`.

    tower       pretrain the vision tower on patch labels               → OUT/tower.safetensors
    projector   fit the projector to embeddings of the patches' words   → OUT/projector.safetensors
    language    train low-rank differences of SmolLM2                   → OUT/checkpoint.safetensors, OUT/curve.jsonl
    pack        pack everything into the file of `python -m zoo.real_vision`
    drafters    pack OUT/trained_strong and OUT/trained_weak, which `jobs.train_drafter` wrote

`tower` and `language` continue from their checkpoints in OUT. `language --columns words` needs no tower;
`--columns tower` continues from it with the pictures themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from zoo.real import drafters
from zoo.real.low_rank import pack as pack_file
from zoo.real.model import WEIGHTS_SHA256
from zoo.real_vision import differences
from zoo.real_vision.labels import HEADS, IMAGE_PX, label_patches
from zoo.real_vision.language import LANGUAGE_MODEL, PROJECTOR, Learner, train
from zoo.real_vision.model import VISION, build_model, build_tower, load_tokenizer
from zoo.real_vision.projector import fit_projector, word_embeddings
from zoo.tower import draw_labelled, pretrain_tower
from zoo.training import report
from zoo.world.dense import draw_dense

OUT = Path("out/real_vision")
TOWER = "model.vision_tower."
TOWER_STEPS, TOWER_BATCH = 2000, 8
CHECKPOINT, TOWER_CHECKPOINT = "checkpoint.safetensors", "tower_checkpoint.safetensors"


def train_tower(options: argparse.Namespace) -> None:
    """Pretrain the tower from a seed and save it."""
    tower = build_tower(options.seed)
    seed = options.seed + 1
    steps = options.until or TOWER_STEPS
    pretrain_tower(
        tower,
        VISION["hidden_size"],
        steps,
        options.seed,
        HEADS,
        draw_step=lambda step: draw_labelled(draw_dense, seed, step, label_patches, TOWER_BATCH, IMAGE_PX),
        batch=TOWER_BATCH,
        dtype=torch.bfloat16,
        checkpoint=options.out / TOWER_CHECKPOINT,
    )
    save_file(
        {TOWER + name: one.contiguous() for name, one in tower.state_dict().items()}, options.out / "tower.safetensors"
    )


def load_parts(model: LlavaForConditionalGeneration, folder: Path, *parts: str) -> None:
    """Load the trained tower or projector of a folder into a model. Raises FileNotFoundError."""
    for part in parts:
        tensors = load_file(folder / f"{part}.safetensors")
        _, unexpected = model.load_state_dict(tensors, strict=False)
        if unexpected:
            raise RuntimeError(f"{folder / part}.safetensors does not fit the model: {unexpected}")


def train_projector(options: argparse.Namespace) -> None:
    """Fit the projector to the trained tower and save it."""
    tokenizer = load_tokenizer()
    model = build_model(tokenizer).eval()
    load_parts(model, options.out, "tower")
    words = word_embeddings(model.get_input_embeddings().weight.detach(), tokenizer)
    projector = model.model.multi_modal_projector
    right = fit_projector(projector, model.model.vision_tower, words, options.seed)
    report(f"nearest word right for {right:.4f} of the patches")
    save_file(
        {PROJECTOR + name: one for name, one in projector.state_dict().items()}, options.out / "projector.safetensors"
    )


def train_language(options: argparse.Namespace) -> None:
    """Train the differences; continue from the folder's checkpoint if there is one."""
    tokenizer = load_tokenizer()
    torch.manual_seed(options.seed)
    model = build_model(tokenizer).eval()
    if options.columns == "tower":
        load_parts(model, options.out, "tower", "projector")
    learner = Learner(model, tokenizer, options.columns)
    if (options.out / CHECKPOINT).exists():
        learner.load(options.out / CHECKPOINT)
    train(learner, options.out, options.until or 10_000, options.cooldown, options.seed, 60.0 * options.minutes)


def pack(options: argparse.Namespace) -> None:
    """Pack tower, projector and differences of the folder's checkpoint."""
    tensors: dict[str, Tensor] = load_file(options.out / "tower.safetensors")
    found = load_file(options.out / CHECKPOINT)
    tensors |= {name: one for name, one in found.items() if name.startswith((LANGUAGE_MODEL, PROJECTOR))}
    size = pack_file(tensors, options.differences, {"weights_sha256": WEIGHTS_SHA256})
    report(f"{options.differences}: {size:,} bytes")


def pack_drafters(options: argparse.Namespace) -> None:
    """Pack the drafters in OUT/trained_strong and OUT/trained_weak."""
    target = drafters.digest(differences.FILE)
    for name, path in differences.DRAFTERS.items():
        size = drafters.pack_drafter(options.out / f"trained_{name}", options.out / "target", path, target)
        report(f"{path}: {size:,} bytes")


STAGES = {
    "tower": train_tower,
    "projector": train_projector,
    "language": train_language,
    "pack": pack,
    "drafters": pack_drafters,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one stage; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m zoo.real_vision.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of the parts (default: {OUT})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=int, default=0, help="last step (default: 2,000 of the tower, 10,000 else)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop `language` after this time (default: 60)")
    parser.add_argument("--columns", choices=("words", "tower"), default="words", help="visual columns of `language`")
    parser.add_argument("--cooldown", type=int, default=0, help="steps before --until in which the rate falls to zero")
    parser.add_argument("--differences", type=Path, default=differences.FILE, help="file of `pack`")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    STAGES[options.stage](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
