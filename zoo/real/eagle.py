"""Packs a trained EAGLE head without the token embedding, which is the target's, and builds its folder.

    python -m zoo.real.eagle      # packs out/real/trained_eagle

The training of an EAGLE head does not change the embedding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.heads.files import write_checkpoint
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.real import drafters
from zoo.real.low_rank import pack
from zoo.real.model import WEIGHTS_SHA256

FILE = Path(__file__).parent / "eagle.safetensors"
EMBEDDING = "embed_tokens.weight"


def pack_head(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> int:
    """Write the file of a head that `jobs.train_drafter` wrote to `folder`, in bfloat16; return its size in bytes.

    Raises ValueError if the head's token embedding is not the target's.
    """
    tensors = load_file(folder / "model.safetensors")
    if not torch.equal(tensors.pop(EMBEDDING).to(torch.bfloat16), embedding_of(target_folder)):
        raise ValueError(f"{folder}: {EMBEDDING} differs from the target's")
    measured = json.loads((folder / "training.json").read_text(encoding="utf-8"))["measured"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    notes = {"config": json.dumps(config), "measured": json.dumps(measured), "target_sha256": target_sha256}
    return pack(tensors, path, notes)


def embedding_of(target_folder: Path) -> Tensor:
    """Return the token embedding (V, D) of a target in bfloat16."""
    target = Target.load(CheckpointRef(str(target_folder)), "bfloat16", "cpu")
    embedding: Tensor = target.decoder.get_input_embeddings().weight  # type: ignore[operator]
    return embedding


def ensure(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> bool:
    """Build a head's folder unless it is complete already; return whether it was built. Raises
    `zoo.real.drafters.OtherTarget`."""

    def write(made: Path, notes: Mapping[str, Any]) -> None:
        tensors = {**load_file(path), EMBEDDING: embedding_of(target_folder)}
        write_checkpoint(made, notes["config"], tensors, torch.bfloat16)

    return drafters.build(folder, path, target_sha256, write)


if __name__ == "__main__":
    size = pack_head(Path("out/real/trained_eagle"), Path("out/real/target"), FILE, WEIGHTS_SHA256)
    print(f"{FILE}: {size:,} bytes", file=sys.stderr)
