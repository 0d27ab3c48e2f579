"""Read and write LlamaGen's VQ model: published `.pt` files, and folders of `config.json` and `model.safetensors`.

Both have the published tensor names; all sizes are read from the tensors' shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from models.heads.files import expect_shapes, shapes_of, write_checkpoint
from models.llamagen.checkpoints import find_files, some_of
from models.llamagen.shape import VqShape
from models.llamagen.vq import NUM_USED, Vq
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

WRAPPERS = ("ema", "model", "state_dict")
"""Keys under which a published `.pt` file may nest its weights; averaged weights first, as in LlamaGen's code."""

# A buffer of training statistics, which files need not contain.
_USED = "quantize.codebook_used"
# Tensors for training only, in checkpoints that were not stripped for release.
_STRAY = re.compile(r"(loss|discriminator)\.")
_CODEBOOK = "quantize.embedding.weight"


def read_vq_shape(ref: CheckpointRef) -> VqShape:
    """Read the shape of a VQ checkpoint from its tensors."""
    checkpoint = find_files(ref)
    return _check(checkpoint.where, checkpoint.shapes(WRAPPERS))


def load_vq(ref: CheckpointRef, dtype: str, device: torch.device, codebook_size: int | None = None) -> Vq:
    """Load a VQ model in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    Raises CheckpointError if `codebook_size`, that of the GPT whose codes are decoded, differs.
    """
    checkpoint = find_files(ref)
    tensors = checkpoint.tensors(WRAPPERS)
    shape = _check(checkpoint.where, shapes_of(tensors))
    if codebook_size is not None and shape.codebook_size != codebook_size:
        raise CheckpointError(
            f"{checkpoint.where}: its codebook has {shape.codebook_size} codes, but the GPT draws from "
            f"{codebook_size}: the two were not trained together"
        )
    with torch.device("meta"):
        vq = Vq(shape)
    state = {name: value.detach() for name, value in tensors.items() if not _STRAY.match(name)}
    state.setdefault(_USED, torch.zeros(NUM_USED))
    vq.load_state_dict(state, strict=True, assign=True)
    return vq.to(device=device, dtype=DTYPES.get(dtype, vq.dtype)).requires_grad_(False).eval()


def save_vq(vq: Vq, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` with LlamaGen's tensor names, without `codebook_used`."""
    tensors = {name: value for name, value in vq.state_dict().items() if name != _USED}
    write_checkpoint(folder, vq.shape.to_config(), tensors, dtype)


def _check(where: str, shapes: Mapping[str, tuple[int, ...]]) -> VqShape:
    """Return the shape; raises CheckpointError if these are not the tensors of a VQ model or some are missing."""
    vq_shapes = {name: size for name, size in shapes.items() if not _STRAY.match(name)}
    try:
        shape = VqShape(**_sizes_of(vq_shapes))
    except (KeyError, IndexError, ZeroDivisionError):
        raise CheckpointError(
            f"{where}: this is no VQ model of LlamaGen's family: it holds {some_of(shapes)}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    with torch.device("meta"):
        expected = shapes_of(Vq(shape).state_dict())
    if _USED not in vq_shapes:
        del expected[_USED]
    expect_shapes(where, vq_shapes, expected)
    return shape


def _sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Infer all sizes from shapes of a few tensors; raises KeyError or IndexError if these are not of a VQ model."""
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
