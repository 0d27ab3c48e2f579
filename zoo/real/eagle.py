"""Packs a trained EAGLE head without the token embedding, which is the target's, and builds its folder.

python -m zoo.real.eagle      # packs out/real/trained_eagle
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from models.heads.files import write_checkpoint
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.real import drafters
from zoo.real.low_rank import pack
from zoo.real.model import WEIGHTS_SHA256

FILE = Path(__file__).parent / "eagle.safetensors"
EMBEDDING = "embed_tokens.weight"


def pack_head(folder: Path, path: Path, target_sha256: str) -> int:
    """Write the file of a head that `jobs.train_drafter` wrote to `folder`, in bfloat16; return its size in bytes."""
    tensors = {name: one for name, one in load_file(folder / "model.safetensors").items() if name != EMBEDDING}
    measured = json.loads((folder / "training.json").read_text(encoding="utf-8"))["measured"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    notes = {"config": json.dumps(config), "measured": json.dumps(measured), "target_sha256": target_sha256}
    return pack(tensors, path, notes)


def ensure(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> bool:
    """Build a head's folder unless it is complete already; return whether it was built. Raises
    `zoo.real.drafters.OtherTarget`."""

    def write(made: Path) -> None:
        target = Target.load(CheckpointRef(str(target_folder)), "bfloat16")
        embedding = target.decoder.get_input_embeddings().weight  # type: ignore[operator]
        tensors = {**load_file(path), EMBEDDING: embedding}
        write_checkpoint(made, drafters.read_notes(path)["config"], tensors, torch.bfloat16)

    return drafters.build(folder, path, target_sha256, write)


if __name__ == "__main__":
    size = pack_head(Path("out/real/trained_eagle"), FILE, WEIGHTS_SHA256)
    print(f"{FILE}: {size:,} bytes", file=sys.stderr)
