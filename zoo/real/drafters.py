"""Packs what was trained for a target into one file, and builds model folders from target and file.

    python -m zoo.real.drafters      # packs every trained drafter and head that exists

A drafter is the target with some of its layers (`head.kind: layer_cut`). Its file has the differences between the
trained layers and the target's, each of the best approximation of rank `RANK`, in bfloat16. The file of an EAGLE head
has no token embedding, which its training does not change: it is the target's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from configs.training import LayerCutHeadConfig
from models.heads.files import make_readable, write_checkpoint
from models.heads.training.layer_cut import cut_layers, save_model
from models.loading.checkpoints import CheckpointRef
from models.loading.inspection import parts_of
from models.target import Target
from zoo.real.model import RECORD, WEIGHTS_SHA256, Refused

TEXT_DRAFTER, EAGLE = (Path(__file__).with_name(f"{name}.safetensors") for name in ("drafter", "eagle"))
VISION_TARGET, STRONG, WEAK = (
    Path(__file__).parents[1] / "real_vision" / f"{name}.safetensors"
    for name in ("target", "strong_drafter", "weak_drafter")
)
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers with low-rank differences (LoRA, Hu et al. 2021)."""
RANK = 64
SCALE = 2.0
"""Factor of the product of both matrices of a difference."""
LARGEST_BYTES = 30_000_000
EMBEDDING = "embed_tokens.weight"


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
    differences: dict[str, Tensor] = {}
    prefix = f"{decoder}.layers."
    for name, weight in drafter.items():
        if name == f"{decoder}.norm.weight":
            differences[name] = weight
        elif not name.startswith(prefix):
            if not torch.equal(weight.to(torch.bfloat16), target[name].to(torch.bfloat16)):
                raise ValueError(f"{name} differs from the target's: only layers can be packed")
        elif name.split(".")[-2] in LAYERS:
            index, rest = name.removeprefix(prefix).split(".", 1)
            difference = weight.float() - target[f"{prefix}{layers[int(index)]}.{rest}"].float()
            differences[f"{name}.down"], differences[f"{name}.up"] = factor(difference, rank)
        else:
            differences[name] = weight
    return differences


def add(model: nn.Module, differences: dict[str, Tensor]) -> list[str]:
    """Add low-rank differences to weights of a model, in float32, and replace its other weights by those given whole;
    return the names of the weights that stay. Raises KeyError or RuntimeError if names or shapes do not fit."""
    weights = model.state_dict()
    new = {name: tensor.float() for name, tensor in differences.items() if not name.endswith((".down", ".up"))}
    for name in (name.removesuffix(".down") for name in differences if name.endswith(".down")):
        down, up = (differences[f"{name}.{part}"].float() for part in ("down", "up"))
        new[name] = weights[name].float() + SCALE * up @ down
    missing, unexpected = model.load_state_dict(new, strict=False)
    if unexpected:
        raise RuntimeError(f"the differences do not fit the model: unexpected {unexpected}")
    return list(missing)


def pack(tensors: dict[str, Tensor], path: Path, notes: dict[str, str]) -> int:
    """Write tensors in bfloat16; return the file's size in bytes. Raises ValueError above 30 MB."""
    packed = save({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, notes)
    if len(packed) > LARGEST_BYTES:
        raise ValueError(f"{path} would have {len(packed):,} bytes, more than {LARGEST_BYTES:,}")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(packed)
    os.replace(partial, path)
    return len(packed)


def pack_drafter(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> int:
    """Write the file of a drafter that `jobs.train_drafter` wrote to `folder`; return its size in bytes.

    `target_sha256` identifies the target.
    """
    target, drafter = (
        Target.load(CheckpointRef(str(source)), "float32", "cpu").model for source in (target_folder, folder)
    )
    run = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    config: Any = target.config
    layers = LayerCutHeadConfig.model_validate(run["job"]["head"]).indices(config.get_text_config().num_hidden_layers)
    decoder, _ = parts_of(target, "the target")
    name = next(name for name, module in target.named_modules() if module is decoder)
    tensors = subtract(target.state_dict(), drafter.state_dict(), layers, name)
    notes = {"layers": json.dumps(layers), "measured": json.dumps(run["measured"]), "target_sha256": target_sha256}
    return pack(tensors, path, notes)


def pack_head(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> int:
    """Write the file of an EAGLE head that `jobs.train_drafter` wrote to `folder`; return its size in bytes.

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


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_notes(path: Path) -> dict[str, Any]:
    """Return `target_sha256` of a packed file, what its training `measured`, and the `layers` of a drafter or the
    `config` of a head."""
    with safe_open(path, "pt") as opened:
        notes = opened.metadata()
    return {name: value if name.endswith("sha256") else json.loads(value) for name, value in notes.items()}


def ensure(folder: Path, target_folder: Path, path: Path, target_sha256: str) -> bool:
    """Build the model folder of a packed drafter or head unless it is complete already; return whether it was built.
    Raises Refused."""

    def write(output: Path) -> None:
        notes = read_notes(path)
        if notes["target_sha256"] != target_sha256:
            raise Refused(f"{path} belongs to another target: train and pack the drafter again")
        if "config" in notes:
            tensors = {**load_file(path), EMBEDDING: embedding_of(target_folder)}
            write_checkpoint(output, notes["config"], tensors, torch.bfloat16)
            return
        target = Target.load(CheckpointRef(str(target_folder)), "float32", "cpu")
        module = cut_layers(target, notes["layers"], freeze_embeddings=True).module
        add(module, load_file(path))
        save_model(module, target.front_end.processor, output, torch.bfloat16)

    return build(folder, {"differences_sha256": digest(path), "target_sha256": target_sha256}, write)


def build(folder: Path, record: dict[str, str], write: Callable[[Path], None]) -> bool:
    """Build a model folder with `write` unless its record is this one; return whether it was built."""
    try:
        if json.loads((folder / RECORD).read_text()) == record:
            return False
    except (OSError, ValueError):
        pass
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        output = Path(scratch) / "model"
        write(output)
        (output / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        make_readable(output)
        shutil.rmtree(folder, ignore_errors=True)
        output.rename(folder)
    return True


def main() -> None:
    """Pack what `jobs.train_drafter` wrote below out/real and out/real_vision."""
    text, vision = Path("out/real"), Path("out/real_vision")
    for trained, write, path in (
        (text / "trained_drafter", pack_drafter, TEXT_DRAFTER),
        (text / "trained_eagle", pack_head, EAGLE),
        (vision / "trained_strong", pack_drafter, STRONG),
        (vision / "trained_weak", pack_drafter, WEAK),
    ):
        if trained.is_dir():
            target = WEIGHTS_SHA256 if trained.parent == text else digest(VISION_TARGET)
            print(f"{path}: {write(trained, trained.parent / 'target', path, target):,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
