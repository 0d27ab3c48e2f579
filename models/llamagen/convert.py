"""`python -m models.llamagen.convert SRC OUT`: a published LlamaGen file becomes `config.json` and `model.safetensors`.

SRC is a `.pt` file, LANTERN's folder, or a hub id of a GPT or a VQ model, detected by its contents. Only tensors are
unpickled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.heads.files import read_shapes
from models.llamagen.checkpoints import WRAPPERS, find_files, load_gpt, save_gpt
from models.llamagen.layouts import layout_of
from models.llamagen.vq_files import WRAPPERS as VQ_WRAPPERS
from models.llamagen.vq_files import load_vq, save_vq
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

_CPU = torch.device("cpu")
_WRITTEN = ("config.json", "model.safetensors")


def convert(ref: CheckpointRef, out: Path, dtype: str = "auto", sizes: dict[str, Any] | None = None) -> str:
    """Convert a checkpoint and write it to the folder `out`; returns a description of it.

    `sizes` contains a GPT's `grid` and `num_heads` if its file does not; `dtype` is as for `load_gpt`.
    """
    if taken := [name for name in _WRITTEN if (out / name).exists()]:
        raise CheckpointError(f"{out}: it holds a {taken[0]} already; take an empty folder")
    if _is_gpt(ref):
        gpt = load_gpt(ref, dtype, _CPU, sizes)
        save_gpt(gpt, out)
        shape = gpt.shape
        size = f"{shape.dim} wide, {shape.num_layers} layers, {shape.num_heads} heads"
        return f"a GPT for images of {shape.grid} x {shape.grid} codes from a {shape.condition}: {size}"
    if sizes:
        raise CheckpointError(f"{ref.path}: this is no GPT, whose {' and '.join(sizes)} could be given")
    vq = load_vq(ref, dtype, _CPU)
    save_vq(vq, out)
    return f"a VQ model with {vq.shape.codebook_size} codes of {vq.shape.factor} x {vq.shape.factor} pixels"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m models.llamagen.convert", description=__doc__)
    parser.add_argument("src", help="a .pt file, a folder, a hub id owner/name, or owner/name/file.pt")
    parser.add_argument("out", type=Path, help="the folder to write; made where there is none")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="type of the written tensors")
    parser.add_argument("--grid", type=int, help="codes along an image's side: 16 for 256 px, 24 for 384, 32 for 512")
    parser.add_argument("--heads", type=int, help="attention heads, for sizes that were not published")
    parser.add_argument("--revision", help="commit of a hub id")
    given = parser.parse_args(arguments)
    sizes = {"grid": given.grid, "num_heads": given.heads}
    try:
        done = convert(
            CheckpointRef(given.src, given.revision),
            given.out,
            given.dtype,
            {name: value for name, value in sizes.items() if value is not None},
        )
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {done}")
    return 0


def _is_gpt(ref: CheckpointRef) -> bool:
    """Return False for VQ models, True otherwise, because the GPT reader reports errors for other files."""
    names: set[str] = set()
    for file in find_files(ref).files:
        # Keys of both models: VQ checkpoints nest averaged weights under a key of their own.
        names |= read_shapes(file, (*VQ_WRAPPERS, *WRAPPERS)).keys()
    return layout_of(names) is not None or "quantize.embedding.weight" not in names


if __name__ == "__main__":
    sys.exit(main())
