"""Read the MTP layer of a target's checkpoint by its keys, and write checkpoints with a trained one.

There are two layouts: `mtp.*` (Qwen3-Next, Qwen3.5), and a further layer of the decoder, `model.layers.N.*` for a
target with N layers (DeepSeek-V3, GLM-4-MoE). vLLM reads both for these families.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from files.local import read_regular
from files.strict_json import parse_object
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.loading.hub import fetch_settings, fetch_weights
from models.loading.settings import (
    MAX_TABLE_BYTES,
    MAX_TABLE_VALUES,
    WEIGHT_SUFFIXES,
    SettingsRefused,
    checked_files,
    weight_files,
)
from models.loading.weight_headers import HeaderError, read_header

INDEX = "model.safetensors.index.json"
SINGLE, SHARDS = "model.safetensors", ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ADDED_SHARD = "model-mtp.safetensors"
BLOCK = "mtp_block."
PARTS = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "post_norm.weight")
"""Tensors of an MTP layer outside its decoder layer."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FURTHER_MODELS = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text")


class MtpMissing(CheckpointError):
    """Raised for a checkpoint without an MTP layer."""


@dataclass(frozen=True)
class MtpLayout:
    """Names of an MTP layer's tensors in checkpoints: `prefix` of all of them, and the names of `PARTS` behind it.

    `block` begins the names of the decoder layer; `shared` are copies of the target's tensors, which are not read.
    `count` is the field of the configuration with the number of layers.
    """

    prefix: str
    parts: tuple[str, str, str, str]
    block: str
    count: str
    shared: tuple[str, ...] = ()

    def stored(self, name: str) -> str:
        """Return the name in checkpoints of a tensor of `MtpNetwork`."""
        if name in PARTS:
            return self.prefix + self.parts[PARTS.index(name)]
        return self.prefix + self.block + name.removeprefix(BLOCK)

    def named(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the layer's names in `MtpNetwork` of those of `keys` that belong to it."""
        named = {}
        for key in keys:
            name = key.removeprefix(self.prefix)
            if name == key or name in self.shared:
                continue
            if name in self.parts:
                named[key] = PARTS[self.parts.index(name)]
            elif name.startswith(self.block):
                named[key] = BLOCK + name.removeprefix(self.block)
        return named


def layouts(num_layers: int) -> tuple[MtpLayout, ...]:
    """Return the layouts of a target with `num_layers` decoder layers."""
    mtp_names = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
    further_names = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    shared = ("embed_tokens.weight", "shared_head.head.weight")
    prefixes = ("model.", "model.language_model.", "language_model.model.")
    return (
        MtpLayout("mtp.", mtp_names, "layers.0.", "mtp_num_hidden_layers"),
        *(
            MtpLayout(f"{prefix}layers.{num_layers}.", further_names, "", "num_nextn_predict_layers", shared)
            for prefix in prefixes
        ),
    )


def find_layout(path: str, keys: Iterable[str], num_layers: int) -> MtpLayout:
    """Return the layout of the MTP layer among the `keys` of a checkpoint's tensors.

    Raises CheckpointError, which names the missing keys, if a part is missing, and MtpMissing if all are.
    """
    known, choices = set(keys), layouts(num_layers)
    given = [layout for layout in choices if layout.named(known)]
    if not given:
        wanted = " or ".join(layout.stored("eh_proj.weight") for layout in choices[:2])
        raise MtpMissing(
            f"{path}: it has no MTP layer: none of its tensors is {wanted}; train one with jobs.train_drafter "
            "(head.kind mtp), or take another method"
        )
    layout = given[0]
    named = set(layout.named(known).values())
    missing = [layout.stored(name) for name in PARTS if name not in named]
    if not any(name.startswith(BLOCK) for name in named):
        missing.append(f"{layout.stored(BLOCK)}*")
    if missing:
        raise CheckpointError(f"{path}: its MTP layer is incomplete: it lacks {', '.join(missing)}")
    return layout


def check_mtp(ref: CheckpointRef, num_layers: int) -> MtpLayout | None:
    """Return the layout of a checkpoint's MTP layer, from headers and indices only; CheckpointError as `find_layout`.

    Returns None for a checkpoint of the hub whose weights are in one file, which is not downloaded.
    """
    folder = ref.fetched(partial(fetch_settings, with_code=False))
    files = _weight_files(ref.path, folder)
    if not files and not ref.is_folder and not (folder / INDEX).is_file():
        return None
    return find_layout(ref.path, _file_by_key(ref.path, folder), num_layers)


def read_mtp(ref: CheckpointRef, num_layers: int) -> dict[str, Tensor]:
    """Read the MTP layer of a checkpoint, on the CPU, by its names in `models.heads.mtp.MtpNetwork`.

    Of several layers the first is read. Experts that are stored one by one are stacked. Raises CheckpointError.
    """
    folder = ref.fetched(partial(fetch_weights, pickled=False))
    file_by_key = _file_by_key(ref.path, folder)
    named = find_layout(ref.path, file_by_key, num_layers).named(file_by_key)
    tensors: dict[str, Tensor] = {}
    for file in sorted({file_by_key[key] for key in named}):
        try:
            read_header(folder / file)
            with safe_open(folder / file, framework="pt") as opened:
                tensors |= {named[key]: opened.get_tensor(key) for key in set(opened.keys()) & set(named)}
        except Exception as error:  # a torn file, or an unknown type
            raise CheckpointError(f"{ref.path}: {file} cannot be read: {error}") from error
    return stack_experts(tensors)


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in which experts stored one by one are `gate_up_proj` (E, 2I, D) and `down_proj` (E, D, I)."""
    stacked = {name: value for name, value in tensors.items() if not _EXPERT.fullmatch(name)}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, value in tensors.items():
        if match := _EXPERT.fullmatch(name):
            where, number, kind = match.groups()
            experts.setdefault(where, {}).setdefault(kind, {})[int(number)] = value
    for where, kinds in experts.items():
        by_kind = {kind: [values[number] for number in sorted(values)] for kind, values in kinds.items()}
        if set(by_kind) != {"gate_proj", "up_proj", "down_proj"} or len(set(map(len, by_kind.values()))) != 1:
            raise CheckpointError(f"{where}: its experts lack gate_proj, up_proj or down_proj")
        try:
            both = [torch.cat(pair) for pair in zip(by_kind["gate_proj"], by_kind["up_proj"], strict=True)]
            stacked |= {f"{where}.gate_up_proj": torch.stack(both)}
            stacked |= {f"{where}.down_proj": torch.stack(by_kind["down_proj"])}
        except RuntimeError as error:
            raise CheckpointError(f"{where}: its experts have different shapes ({error})") from None
    return stacked


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the experts one by one, as vLLM reads them; the inverse of `stack_experts`."""
    split: dict[str, Tensor] = {}
    for name, value in tensors.items():
        where, _, kind = name.rpartition(".")
        if not where.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
            split[name] = value
            continue
        for number, expert in enumerate(value):
            parts = {kind: expert}
            if kind == "gate_up_proj":
                gate, up = expert.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            split |= {f"{where}.{number}.{part}.weight": each for part, each in parts.items()}
    return split


def export_layout(model_type: str, num_layers: int) -> MtpLayout:
    """Return the layout in which a trained layer of a target's text model is written: that of its family in vLLM, and
    `mtp.*` for families of which vLLM reads no MTP layer."""
    own, further, *_ = layouts(num_layers)
    return further if model_type in _FURTHER_MODELS else own


def save_with_mtp(
    ref: CheckpointRef, tensors: Mapping[str, Tensor], model_type: str, num_layers: int, folder: Path
) -> None:
    """Write a copy of a checkpoint to `folder` with an MTP layer `tensors`, by their names in `MtpNetwork`.

    The layer is a shard of its own, and `config.json` gives the number of layers. `model_type` and `num_layers` are
    those of the text model. Raises CheckpointError if the checkpoint has an MTP layer already.
    """
    source = ref.fetched(partial(fetch_weights, pickled=False))
    if not ref.is_folder:
        fetch_settings(ref.path, source.name, with_code=False)
    file_by_key = _file_by_key(ref.path, source)
    layout = export_layout(model_type, num_layers)
    if layout.named(file_by_key):
        raise CheckpointError(f"{ref.path}: it has an MTP layer already, at {layout.prefix}*")
    folder.mkdir(parents=True, exist_ok=True)
    for file in checked_files(source):
        if file.suffix not in WEIGHT_SUFFIXES or file.name in file_by_key.values():
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    shard, single = ADDED_SHARD, folder / SINGLE
    if single.is_file():
        single.rename(folder / SHARDS[0])
        file_by_key, shard = dict.fromkeys(file_by_key, SHARDS[0]), SHARDS[1]
    stored = {layout.stored(name): value.detach().cpu().contiguous() for name, value in split_experts(tensors).items()}
    save_file(stored, folder / shard, metadata={"format": "pt"})
    weight_map = file_by_key | dict.fromkeys(stored, shard)
    size = sum(tensor.num_bytes for file in set(weight_map.values()) for tensor in read_header(folder / file).values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = next((config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config)
    text[layout.count] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _weight_files(path: str, folder: Path) -> list[str]:
    """Return the names of a folder's weight files: those of its index, if it has one, else all."""
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        try:
            return sorted(weight_files(folder / INDEX))
        except SettingsRefused as error:
            raise CheckpointError(f"{path}: {error}") from None
    return sorted(file.name for file in folder.glob("*.safetensors"))


def _file_by_key(path: str, folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint: from the headers of its files, or without them its index."""
    try:
        files = _weight_files(path, folder)
        if files and all((folder / file).is_file() for file in files):
            return {key: file for file in files for key in read_header(folder / file)}
        index = parse_object(read_regular(folder / INDEX, MAX_TABLE_BYTES), MAX_TABLE_VALUES)
        return {str(key): str(file) for key, file in index["weight_map"].items()}
    except (HeaderError, OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: its weights cannot be read: {error}") from None
