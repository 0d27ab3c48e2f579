"""Read and write checkpoints of LlamaGen's GPT: published `.pt` files, LANTERN's folders, and folders of this project.

A folder of this project has `config.json` (the fields of `GptShape`) and `model.safetensors` with LlamaGen's tensor
names, so that LlamaGen can load it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from torch import Tensor

from models.heads import files
from models.llamagen.gpt import Gpt
from models.llamagen.layouts import LANTERN, OFFICIAL, expected_shapes, from_gpt, is_stray, layout_of, sizes_of, to_gpt
from models.llamagen.shape import GPT_TYPE, GptShape
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef, first_line, sampled_digest

WRAPPERS = ("model", "module", "state_dict")
"""Keys under which a published `.pt` file may nest its weights (DDP, DeepSpeed, Lightning); FSDP files have none."""

PICKLED = (".pt", ".pth", ".bin")
WEIGHT_SUFFIXES = (*PICKLED, ".safetensors")
# Names of published files contain the image side in pixels; one code is 16 × 16 pixels in all of them.
_PUBLISHED_NAME = re.compile(r"[ct]2i_(?:B|L|XL|XXL|3B)(?:_stage[12])?_(256|384|512)\.pt")
_PIXELS_PER_CODE = 16


@dataclass(frozen=True)
class FoundFiles:
    """Contents of a checkpoint's `config.json`, empty if there is none, and its weight files, if downloaded."""

    where: str
    config: dict[str, Any]
    files: tuple[Path, ...]

    def shapes(self, wrappers: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Read names and shapes of all tensors; `wrappers` as for `models.heads.files.read_tensors`."""
        return {name: shape for file in self.files for name, shape in files.read_shapes(file, wrappers).items()}

    def tensors(self, wrappers: Sequence[str]) -> dict[str, Tensor]:
        """Read all tensors to the CPU; `wrappers` as for `shapes`."""
        return {name: value for file in self.files for name, value in files.read_tensors(file, wrappers).items()}


def find_files(ref: CheckpointRef, weights: bool = True) -> FoundFiles:
    """Find the files of a file, a folder, a hub id `owner/name`, or one file of the hub, `owner/name/file.pt`.

    Without `weights` only the configuration is downloaded from a hub id.
    """
    path = Path(ref.path)
    if ref.is_file:
        return FoundFiles(ref.path, files.read_json(path.parent), (path,))
    if path.suffix in WEIGHT_SUFFIXES:
        return FoundFiles(ref.path, {}, (_fetch(ref),))
    folder = files.head_folder(ref, ("model*.safetensors",), weights)
    return FoundFiles(ref.path, files.read_json(folder), _weight_files(folder) if ref.is_folder or weights else ())


def read_gpt_shape(ref: CheckpointRef) -> GptShape:
    """Read the shape of a checkpoint from its tensors' shapes and its `config.json`.

    The number of heads is known for published sizes, the grid from published file names; otherwise `config.json` must
    contain `num_heads` and `grid`. For a hub id only the configuration is downloaded.
    """
    checkpoint = find_files(ref, weights=False)
    if checkpoint.files:
        return _check(checkpoint, checkpoint.shapes(WRAPPERS))[0]
    return _shape(checkpoint, {}, LANTERN if "hidden_size" in checkpoint.config else OFFICIAL)


def load_gpt(ref: CheckpointRef, dtype: str, device: torch.device) -> Gpt:
    """Load a GPT in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type."""
    checkpoint = find_files(ref)
    tensors = checkpoint.tensors(WRAPPERS)
    shape, layout = _check(checkpoint, files.shapes_of(tensors))
    gpt = gpt_from_weights(shape, tensors, layout)
    return gpt.to(device=device, dtype=DTYPES.get(dtype, gpt.output.weight.dtype))


def gpt_from_weights(shape: GptShape, weights: Mapping[str, Tensor], layout: str = OFFICIAL) -> Gpt:
    """Create a GPT in evaluation mode from weights that fit `shape`, with the tensor names of `layout`."""
    with torch.device("meta"):
        gpt = Gpt(shape)
    tensors = {name: value.detach() for name, value in weights.items() if not is_stray(name)}
    gpt.load_state_dict(to_gpt(tensors, shape, layout), strict=True, assign=True)
    return gpt.requires_grad_(False).eval()


def save_gpt(gpt: Gpt, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors`, with LlamaGen's tensor names and order of rotary pairs."""
    files.write_checkpoint(folder, gpt.shape.to_config(), from_gpt(gpt.state_dict(), gpt.shape), dtype)


def revision_of(ref: CheckpointRef) -> str:
    """Return an identifier of GPT or VQ weights: the hub commit, or `sampled_digest` over local files."""
    path = Path(ref.path)
    if ref.is_file:
        paths = [path, *path.parent.glob("config.json")]
    elif path.suffix in WEIGHT_SUFFIXES:
        return _fetch(ref).parent.name
    elif not ref.is_folder:
        return files.head_folder(ref, (), weights=False).name
    else:
        paths = sorted(file for file in path.iterdir() if file.suffix in (*WEIGHT_SUFFIXES, ".json"))
    return sampled_digest(paths)


def _fetch(ref: CheckpointRef) -> Path:
    if ref.path.startswith(("/", ".", "~")) or ref.path.count("/") != 2:
        raise CheckpointError(f"{ref.path}: no such file (and not a file of the hub of the form owner/name/file.pt)")
    owner, name, file = ref.path.split("/")
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, revision=ref.revision))
    except Exception as error:  # errors of the hub, the network and the disk
        raise CheckpointError(f"{ref.path}: it cannot be fetched from the hub: {first_line(error)}") from error


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    if shards := sorted(folder.glob("model-*-of-*.safetensors")):
        return tuple(shards)
    pickled = sorted(file for file in folder.iterdir() if file.suffix in PICKLED)
    if not pickled:
        raise CheckpointError(f"{folder}: it holds no weights: neither model.safetensors nor a .pt file")
    if len(pickled) > 1:
        raise CheckpointError(f"{folder}: it holds {len(pickled)} weight files; name one, such as {pickled[0]}")
    return (pickled[0],)


def _check(checkpoint: FoundFiles, shapes: dict[str, tuple[int, ...]]) -> tuple[GptShape, str]:
    """Return shape and layout; raises CheckpointError if config and tensors disagree or tensors are missing."""
    layout = layout_of(shapes)
    if layout is None:
        what = "a VQ model" if "quantize.embedding.weight" in shapes else f"something else ({some_of(shapes)})"
        raise CheckpointError(
            f"{checkpoint.where}: this is {what}, not LlamaGen's GPT: it holds neither tok_embeddings.weight nor "
            "model.embed_tokens.weight"
        )
    shape = _shape(checkpoint, sizes_of(shapes, layout, checkpoint.where), layout)
    gpt_shapes = {name: size for name, size in shapes.items() if not is_stray(name)}
    files.expect_shapes(checkpoint.where, gpt_shapes, expected_shapes(shape, layout))
    return shape, layout


def _shape(checkpoint: FoundFiles, stored: dict[str, Any], layout: str) -> GptShape:
    """Create the shape from sizes of the tensors and the configuration, which takes precedence."""
    configured = _translate(checkpoint) if layout == LANTERN else _configured(checkpoint)
    for name, value in stored.items():
        if name != "num_heads" and configured.get(name, value) != value:
            raise CheckpointError(
                f"{checkpoint.where}: config.json sets {name} to {configured[name]!r}, but the weights have {value!r}"
            )
    names = [match for file in checkpoint.files if (match := _PUBLISHED_NAME.fullmatch(file.name))]
    merged = ({"grid": int(names[0][1]) // _PIXELS_PER_CODE} if names else {}) | stored | configured
    if merged.get("grid") is None:
        raise CheckpointError(
            f"{checkpoint.where}: the number of codes per image side is unknown; config.json in the same folder must "
            'give "grid" (16 for 256 px, 24 for 384 px, 32 for 512 px)'
        )
    if "num_heads" not in merged:
        raise CheckpointError(
            f"{checkpoint.where}: {merged.get('dim')} wide with {merged.get('num_layers')} layers is no published "
            'size, and the number of heads cannot be read from weights; config.json must give "num_heads"'
        )
    if missing := [field.name for field in fields(GptShape)[:8] if field.name not in merged]:
        raise CheckpointError(f"{checkpoint.where}: config.json does not give {missing[0]}")
    try:
        return GptShape(**merged)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.where}: {error}") from None


def _configured(checkpoint: FoundFiles) -> dict[str, Any]:
    """Return the fields of `GptShape` in `config.json`; empty without a file."""
    if not checkpoint.config:
        return {}
    if (kind := checkpoint.config.get("model_type")) != GPT_TYPE:
        raise CheckpointError(
            f"{checkpoint.where}: config.json beside it is of {kind!r}, but the weights are LlamaGen's; it must say "
            f'"model_type": "{GPT_TYPE}", or not be there'
        )
    sizes = {name: value for name, value in checkpoint.config.items() if name != "model_type"}
    if unknown := sorted(sizes.keys() - {field.name for field in fields(GptShape)}):
        raise CheckpointError(f"{checkpoint.where}: config.json gives {unknown[0]}, which no LlamaGen has")
    return sizes


def _translate(checkpoint: FoundFiles) -> dict[str, Any]:
    """Convert LANTERN's `config.json`, a Llama config with additional fields, to fields of `GptShape`."""
    config, where = checkpoint.config, checkpoint.where
    needed = ("num_attention_heads", "rms_norm_eps", "block_size")
    if missing := [name for name in needed if name not in config]:
        raise CheckpointError(f"{where}: config.json, as LANTERN writes it, has to give {missing[0]}")
    kind = config.get("input_type", "t2i")
    if kind not in ("t2i", "c2i"):
        raise CheckpointError(f"{where}: input_type in config.json must be t2i or c2i, not {kind!r}")
    if config.get("num_key_value_heads", config["num_attention_heads"]) != config["num_attention_heads"]:
        raise CheckpointError(f"{where}: LlamaGen has as many key heads as query heads, but config.json differs")
    block = config["block_size"]
    if not isinstance(block, int) or block < 1 or math.isqrt(block) ** 2 != block:
        raise CheckpointError(f"{where}: block_size in config.json must be a square number, not {block!r}")
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "ffn_dim",
        "vocab_size": "vocab_size",
        "cls_token_num": "num_condition_tokens",
        "rms_norm_eps": "rms_eps",
        "rope_base": "rope_base",
        **({"caption_dim": "condition_dim"} if kind == "t2i" else {"num_classes": "num_classes"}),
    }
    sizes: dict[str, Any] = {ours: config[name] for name, ours in names.items() if config.get(name) is not None}
    return sizes | {"grid": math.isqrt(block), "condition": "text" if kind == "t2i" else "class"}


def some_of(shapes: Mapping[str, Any]) -> str:
    """Return the first two tensor names, for error messages."""
    return ", ".join(list(shapes)[:2]) or "nothing at all"
