"""Files of LlamaGen's VQ model: the published `.pt` files, and folders of `config.json` beside `model.safetensors`.

Both hold the published names; every size is read from the tensors' shapes. Owns reading and writing; the network is
`models.llamagen.vq`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.heads.files import expect_shapes, read_shapes, read_tensors
from models.llamagen.checkpoints import FoundFiles, find_files
from models.llamagen.shape import VQ_TYPE, VqShape
from models.llamagen.vq import NUM_USED, Vq
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

WRAPPERS = ("ema", "model", "state_dict")
"""Keys under which a published `.pt` file may keep its weights; averaged ones come first, as in LlamaGen itself."""

# The record of used codes is no weight: files written without it are whole.
_USED = "quantize.codebook_used"
# What only training needs, in checkpoints that were not cut down for release.
_STRAY = re.compile(r"(loss|discriminator)\.")
_CODEBOOK = "quantize.embedding.weight"


def read_vq_shape(ref: CheckpointRef) -> VqShape:
    """The shape of a VQ checkpoint, from its tensors; a `config.json` beside it must agree.

    Raises:
        CheckpointError: a file is missing, unreadable or not a VQ model's, tensors are missing or misshapen, or
            `config.json` disagrees.
    """
    found = find_files(ref)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in found.files:
        shapes |= read_shapes(file, WRAPPERS)
    return _check(found, shapes)


def load_vq(ref: CheckpointRef, dtype: str, device: torch.device, codebook_size: int | None = None) -> Vq:
    """Load a VQ model in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    Give the `codebook_size` of the GPT whose codes are to be decoded.

    Raises:
        CheckpointError: as `read_vq_shape`, or the codebook has another size than asked for.
    """
    found = find_files(ref)
    tensors: dict[str, Tensor] = {}
    for file in found.files:
        tensors |= read_tensors(file, WRAPPERS)
    shape = _check(found, {name: tuple(value.shape) for name, value in tensors.items()})
    if codebook_size is not None and shape.codebook_size != codebook_size:
        raise CheckpointError(
            f"{found.where}: its codebook has {shape.codebook_size} codes, but the GPT draws from {codebook_size}: the "
            "two were not trained together"
        )
    with torch.device("meta"):
        vq = Vq(shape)
    kept = {name: value.detach() for name, value in tensors.items() if not _STRAY.match(name)}
    kept.setdefault(_USED, torch.zeros(NUM_USED))
    vq.load_state_dict(kept, strict=True, assign=True)
    return vq.to(device=device, dtype=DTYPES.get(dtype, vq.dtype)).requires_grad_(False).eval()


def save_vq(vq: Vq, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` under LlamaGen's own names, without the record of used codes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", dtype or value.dtype).contiguous()
        for name, value in vq.state_dict().items()
        if name != _USED
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(vq.shape.to_config(), indent=2) + "\n", encoding="utf-8")


def _check(found: FoundFiles, shapes: Mapping[str, tuple[int, ...]]) -> VqShape:
    """The shape that config and tensors agree on; every tensor is there and of its shape."""
    kept = {name: size for name, size in shapes.items() if not _STRAY.match(name)}
    try:
        told = _told(kept)
    except (KeyError, IndexError, ZeroDivisionError):
        some = ", ".join(list(shapes)[:2]) or "nothing at all"
        raise CheckpointError(f"{found.where}: this is no VQ model of LlamaGen's family: it holds {some}") from None
    said = _said(found)
    for name, value in said.items():
        if told[name] != value:
            raise CheckpointError(
                f"{found.where}: config.json says {name} is {value!r}, but the weights say {told[name]!r}"
            )
    try:
        shape = VqShape(**told)
    except ValueError as error:
        raise CheckpointError(f"{found.where}: {error}") from None
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in Vq(shape).state_dict().items()}
    if _USED not in kept:
        del expected[_USED]
    expect_shapes(found.where, kept, expected)
    return shape


def _told(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Every size, from the shapes of a few tensors; raises KeyError or IndexError where they are not a VQ model's."""
    blocks = {name.split(".")[2] for name in shapes if name.startswith("encoder.conv_blocks.")}
    first = {name.split(".")[4] for name in shapes if name.startswith("encoder.conv_blocks.0.res.")}
    channels = shapes["encoder.conv_in.weight"][0]
    widths = [shapes[f"encoder.conv_blocks.{index}.res.0.conv1.weight"][0] for index in range(len(blocks))]
    return {
        "codebook_size": shapes[_CODEBOOK][0],
        "code_dim": shapes[_CODEBOOK][1],
        "channels": channels,
        "multipliers": tuple(width // channels for width in widths),
        "num_res_blocks": len(first),
        "latent_dim": shapes["encoder.conv_out.weight"][0],
    }


def _said(found: FoundFiles) -> dict[str, Any]:
    """The sizes in a `config.json` of this project; empty without such a file."""
    if not found.config:
        return {}
    kind = found.config.get("model_type")
    if kind != VQ_TYPE:
        raise CheckpointError(
            f"{found.where}: config.json beside it is of {kind!r}, but the weights are a VQ model's; it must say "
            f'"model_type": "{VQ_TYPE}", or not be there'
        )
    said = {name: value for name, value in found.config.items() if name != "model_type"}
    if unknown := sorted(said.keys() - {field.name for field in fields(VqShape)}):
        raise CheckpointError(f"{found.where}: config.json gives {unknown[0]}, which no VQ model has")
    if isinstance(said.get("multipliers"), list):
        said["multipliers"] = tuple(said["multipliers"])
    return said
