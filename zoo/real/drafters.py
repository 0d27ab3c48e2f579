"""Packs trained drafters as low-rank differences to layers of their target, and builds drafters' folders from them.

    python -m zoo.real.drafters      # packs out/real/trained_drafter

A drafter is the target with some of its layers (`head.kind: layer_cut`). Its file has the differences between the
trained layers and the target's, each of the best approximation of rank `RANK`, in bfloat16.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from configs.training import LayerCutHead
from models.heads.files import make_readable
from models.heads.training.layer_cut import cut_layers, save_model
from models.loading.checkpoints import CheckpointRef
from models.loading.inspection import parts_of
from models.target import Target
from zoo.real.low_rank import LAYERS, SCALE, add, pack
from zoo.real.model import RECORD, WEIGHTS_SHA256

FILE = Path(__file__).parent / "drafter.safetensors"
RANK = 64


class OtherTarget(Exception):
    """The file of a drafter was made for another target; the message states what to do."""


def factor(difference: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return `down` [rank, in] and `up` [out, rank], whose product times SCALE is the nearest matrix of that rank."""
    left, values, right = torch.linalg.svd(difference.float(), full_matrices=False)
    root = (values[:rank] / SCALE).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def subtract(
    target: Mapping[str, Tensor], drafter: Mapping[str, Tensor], layers: Sequence[int], decoder: str, rank: int = RANK
) -> dict[str, Tensor]:
    """Return the differences of a drafter's layers to the target's `layers`, by the drafter's names.

    `decoder` is the name of the decoder in both models. Linear layers have two factors, `….down` and `….up`; other
    weights are whole. Raises ValueError if other parts than the layers and the last norm were trained.
    """
    found: dict[str, Tensor] = {}
    prefix = f"{decoder}.layers."
    for name, own in drafter.items():
        if name == f"{decoder}.norm.weight":
            found[name] = own
        elif not name.startswith(prefix):
            if not torch.equal(own.to(torch.bfloat16), target[name].to(torch.bfloat16)):
                raise ValueError(f"{name} differs from the target's: only layers can be packed")
        else:
            place, rest = name.removeprefix(prefix).split(".", 1)
            if name.split(".")[-2] in LAYERS:
                difference = own.float() - target[f"{prefix}{layers[int(place)]}.{rest}"].float()
                found[f"{name}.down"], found[f"{name}.up"] = factor(difference, rank)
            else:
                found[name] = own
    return found


def pack_drafter(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> int:
    """Write the file of a drafter that `jobs.train_drafter` wrote to `folder`; return its size in bytes.

    `target_sha256` identifies the target.
    """
    target, drafter = (Target.load(CheckpointRef(str(one)), "float32", "cpu").model for one in (target_folder, folder))
    run = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    head, config = LayerCutHead.model_validate(run["job"]["head"]), target.config
    layers = head.indices(config.get_text_config().num_hidden_layers)  # type: ignore[operator,union-attr]
    decoder, _ = parts_of(target, "the target")
    name = next(name for name, module in target.named_modules() if module is decoder)
    tensors = subtract(target.state_dict(), drafter.state_dict(), layers, name)
    notes = {"layers": json.dumps(layers), "measured": json.dumps(run["measured"]), "target_sha256": target_sha256}
    return pack(tensors, path, notes)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_notes(path: Path) -> dict[str, Any]:
    """Return `target_sha256` of a packed drafter, what its training `measured`, and its `layers` or, of a head, its
    `config`."""
    with safe_open(path, "pt") as opened:
        notes = opened.metadata()
    return {name: value if name == "target_sha256" else json.loads(value) for name, value in notes.items()}


def ensure(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> bool:
    """Build a drafter's model folder unless it is complete already; return whether it was built. Raises OtherTarget."""

    def write(made: Path, notes: Mapping[str, Any]) -> None:
        target = Target.load(CheckpointRef(str(target_folder)), "float32", "cpu")
        module = cut_layers(target, notes["layers"], freeze_embeddings=True).module
        add(module, load_file(path))
        save_model(module, target.front_end.processor, made, torch.bfloat16)

    return build(folder, path, target_sha256, write)


def build(folder: Path, path: Path, target_sha256: str, write: Callable[[Path, Mapping[str, Any]], None]) -> bool:
    """Build a model folder from the packed file `path`, unless it is complete already; return whether it was built.

    `write` gets the folder and the file's notes. Raises OtherTarget.
    """
    record = {"differences_sha256": digest(path), "target_sha256": target_sha256}
    if read_record(folder) == record:
        return False
    notes = read_notes(path)
    if notes["target_sha256"] != target_sha256:
        raise OtherTarget(f"{path} belongs to another target: train and pack the drafter again")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        made = Path(scratch) / "model"
        write(made, notes)
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        make_readable(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return True


def read_record(folder: Path) -> dict[str, str] | None:
    """Return the record of a built folder; None without a readable one."""
    try:
        found: dict[str, str] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return found


if __name__ == "__main__":
    size = pack_drafter(Path("out/real/trained_drafter"), Path("out/real/target"), FILE, WEIGHTS_SHA256)
    print(f"{FILE}: {size:,} bytes", file=sys.stderr)
