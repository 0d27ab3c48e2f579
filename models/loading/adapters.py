"""Merge a LoRA adapter of PEFT into the weights of a model when it is loaded.

Hu et al. 2021 (arXiv 2106.09685): W + s · B A, with s = alpha / r, or alpha / √r with `use_rslora` (Kalajdzievski 2023,
arXiv 2312.03732). The product is computed in float32 and added in the weight's dtype, as PEFT's `merge_and_unload`
does. It reads `adapter_config.json` and `adapter_model.safetensors` of a folder, and no pickled files.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from files.local import open_regular
from files.strict_json import JsonError, parse_json
from models.loading.checkpoints import CheckpointError
from models.loading.weight_headers import HeaderError, stored_weights

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 1 << 20
DIGEST_BYTES = 1 << 24
_LORA = re.compile(r"(?P<module>.+)\.(?P<kind>lora_embedding_|lora_)(?P<side>[AB])(?P<weight>\.weight)?$")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Kinds of `init_lora_weights` that change the weights of the model that the adapter is added to."""
MERGED = frozenset(
    ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern")
)
WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
        *("exclude_modules", "lora_dropout", "init_lora_weights", "layers_to_transform", "layers_pattern"),
        *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config"),
        *("qalora_group_size", "bias"),
    )
)
"""Keys that name the training of an adapter, or choose the modules whose tensors it holds."""


def read_adapter(path: str) -> Adapter:
    """Read the settings and tensor names of an adapter; raises CheckpointError, which names the key or the file."""
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{path}: no such folder; download the adapter, and name its folder")
    adapter = Adapter(path, _settings(path, folder))
    _check(path, adapter.settings)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        if pickled := sorted(file.name for file in folder.glob("adapter_model.*")):
            raise CheckpointError(
                f"{path}: its weights are pickled ({pickled[0]}), and opening a pickle can run any code; save it with "
                "PEFT's save_pretrained(safe_serialization=True)"
            )
        raise CheckpointError(f"{path}: it holds no {WEIGHTS_FILE}")
    try:
        stored_weights(folder)
        _ = adapter.parts
    except (HeaderError, SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {WEIGHTS_FILE} cannot be read: {error}") from None
    return adapter


def _settings(path: str, folder: Path) -> dict[str, Any]:
    try:
        with open_regular(folder / CONFIG_FILE) as stream:
            settings = parse_json(stream.read(MAX_CONFIG_BYTES))
    except OSError as error:
        raise CheckpointError(f"{path}: {CONFIG_FILE} cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise CheckpointError(f"{path}: {CONFIG_FILE} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: {CONFIG_FILE} holds {type(settings).__name__}, and it should be an object")
    return settings


def _check(path: str, settings: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a setting that this merge does not follow."""

    def refuse(key: str, why: str) -> None:
        raise CheckpointError(f"{path}: {CONFIG_FILE}: {key}: {settings.get(key)!r:.100} {why}")

    if settings.get("peft_type") != "LORA":
        refuse("peft_type", "is not supported; adapters of the type LORA are merged")
    if settings.get("bias", "none") != "none":
        refuse("bias", "is not supported: only weights are merged; train with bias 'none'")
    kind = settings.get("init_lora_weights")
    if isinstance(kind, str) and kind.lower().startswith(_CHANGES_BASE):
        refuse("init_lora_weights", "changes the base model; convert the adapter to plain LoRA when it is saved")
    for key in sorted(settings.keys() - MERGED - WITHOUT_EFFECT):
        if settings[key] not in (None, False, "", [], {}):
            refuse(key, "is not supported by the merge")
    for key, least in (("r", 1), ("lora_alpha", None)):
        value = settings.get(key)
        numbers = (int,) if key == "r" else (int, float)
        if isinstance(value, bool) or not isinstance(value, numbers) or (least is not None and value < least):
            refuse(key, "is no number of a LoRA adapter")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(settings.get(key) or {}, dict):
            refuse(key, "is no object")
    if not isinstance(settings.get("target_modules"), (str, list, type(None))):
        refuse("target_modules", "is neither a pattern nor a list of names")


@dataclass(frozen=True)
class LoraPart:
    """The tensors of one module by name; `is_embedding` is whether it is an embedding."""

    module: str
    a: str
    b: str
    is_embedding: bool


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read by `read_adapter`: its folder and the settings of its configuration."""

    path: str
    settings: Mapping[str, Any]

    @property
    def _file(self) -> Path:
        return Path(self.path) / WEIGHTS_FILE

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        with safe_open(self._file, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    @cached_property
    def digest(self) -> str:
        """Hash of the configuration and of all bytes of the weights."""
        digest = hashlib.sha256()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with open_regular(Path(self.path) / name) as stream:
                digest.update(f"{name}:".encode())
                while data := stream.read(DIGEST_BYTES):
                    digest.update(data)
        return digest.hexdigest()[:16]

    @cached_property
    def parts(self) -> tuple[tuple[LoraPart, ...], tuple[str, ...]]:
        """The pairs of low-rank matrices by module, and the names of tensors of `modules_to_save`."""
        sides: dict[tuple[str, bool], dict[str, str]] = {}
        saved: list[str] = []
        for name in self._shapes:
            if "lora_magnitude_vector" in name:
                raise CheckpointError(f"{self.path}: {CONFIG_FILE}: use_dora: DoRA ({name}) is not supported")
            match = _LORA.fullmatch(name)
            if match is None:
                self._check_saved(name)
                saved.append(name)
                continue
            is_embedding = match["kind"] == "lora_embedding_"
            sides.setdefault((match["module"], is_embedding), {})[match["side"]] = name
        parts = []
        for (module, is_embedding), pair in sides.items():
            if pair.keys() != {"A", "B"}:
                raise CheckpointError(f"{self.path}: {WEIGHTS_FILE}: {module} has {next(iter(pair.values()))} alone")
            self._check_targeted(module)
            parts.append(LoraPart(module.removeprefix(PREFIX), pair["A"], pair["B"], is_embedding))
        if not parts and not saved:
            raise CheckpointError(f"{self.path}: {WEIGHTS_FILE} holds no tensors of an adapter")
        return tuple(parts), tuple(saved)

    def _check_targeted(self, module: str) -> None:
        """Raise CheckpointError unless `target_modules` name the module, by its end or by a pattern, as PEFT does."""
        targets, name = self.settings.get("target_modules"), module.removeprefix(PREFIX)
        if targets is None or targets == "all-linear":
            return
        if isinstance(targets, str):
            try:
                is_named = re.fullmatch(targets, name) is not None
            except re.error as error:
                raise CheckpointError(f"{self.path}: {CONFIG_FILE}: target_modules: no pattern: {error}") from None
        else:
            is_named = any(name == target or name.endswith(f".{target}") for target in targets)
        if not is_named:
            raise CheckpointError(f"{self.path}: {CONFIG_FILE}: target_modules: they do not name {name}")

    def _check_saved(self, name: str) -> None:
        module = name.removeprefix(PREFIX).rpartition(".")[0]
        saved = self.settings.get("modules_to_save") or ()
        if not any(module == target or f".{target}." in f".{module}." for target in saved):
            raise CheckpointError(
                f"{self.path}: {WEIGHTS_FILE}: {name} is neither a low-rank matrix nor of modules_to_save"
            )

    def scale_of(self, module: str) -> float:
        """Return s of a module, by `rank_pattern` and `alpha_pattern` if they name it."""
        rank = self._pattern("rank_pattern", module, self.settings["r"])
        alpha = self._pattern("alpha_pattern", module, self.settings["lora_alpha"])
        return float(alpha / math.sqrt(rank)) if self.settings.get("use_rslora") else float(alpha / rank)

    def rank_of(self, module: str) -> int:
        return int(self._pattern("rank_pattern", module, self.settings["r"]))

    def _pattern(self, key: str, module: str, default: float) -> float:
        for pattern, value in (self.settings.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return float(value)
        return default

    def merge(self, model: nn.Module) -> None:
        """Add the low-rank products to the weights of a model on the CPU, and copy the tensors of `modules_to_save`.

        Raises CheckpointError if the model has no such module, shapes differ, or a weight is shared by two modules.
        """
        parts, saved = self.parts
        with torch.no_grad(), safe_open(self._file, "pt") as file:
            for part, weight in self._weights(model, parts):
                a, b = (file.get_tensor(name).float() for name in (part.a, part.b))
                product = (b @ a) * self.scale_of(part.module)
                weight += (product.T if part.is_embedding else product).to(weight.dtype)
            for name in saved:
                self._saved_weight(model, name).copy_(file.get_tensor(name))

    def check(self, model: nn.Module) -> None:
        """Raise the errors of `merge` for a model, which may be on the device `meta`."""
        parts, saved = self.parts
        for _ in self._weights(model, parts):
            pass
        for name in saved:
            self._saved_weight(model, name)

    def _weights(self, model: nn.Module, parts: Sequence[LoraPart]) -> Iterator[tuple[LoraPart, Tensor]]:
        """Yield each part with the weight (out, in) of its linear layer, or (V, D) of its embedding."""
        for part in parts:
            module, name = self._module(model, part.module)
            if not isinstance(module, nn.Embedding if part.is_embedding else nn.Linear):
                kind = type(module).__name__
                raise CheckpointError(f"{self.path}: {WEIGHTS_FILE}: {part.module} is a {kind}, which is not merged")
            weight = module.weight
            rows, columns = weight.shape
            shapes = ((self.rank_of(part.module), columns), (rows, self.rank_of(part.module)))
            if part.is_embedding:
                shapes = ((self.rank_of(part.module), rows), (columns, self.rank_of(part.module)))
            for tensor, shape in zip((part.a, part.b), shapes, strict=True):
                self._check_shape(tensor, shape)
            self._check_shared(model, weight, name)
            yield part, weight

    def _saved_weight(self, model: nn.Module, name: str) -> Tensor:
        path, _, tensor = name.removeprefix(PREFIX).rpartition(".")
        module, found = self._module(model, path)
        weight = getattr(module, tensor, None)
        if not isinstance(weight, Tensor):
            raise CheckpointError(f"{self.path}: {WEIGHTS_FILE}: the model has no tensor {path}.{tensor}")
        self._check_shape(name, tuple(weight.shape))
        self._check_shared(model, weight, found)
        return weight

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes[name] != shape:
            raise CheckpointError(
                f"{self.path}: {WEIGHTS_FILE}: {name} has the shape {list(self._shapes[name])}, and the model and "
                f"{CONFIG_FILE} ask for {list(shape)}"
            )

    def _check_shared(self, model: nn.Module, weight: Tensor, name: str) -> None:
        for other, module in model.named_modules(remove_duplicate=True):
            if other != name and getattr(module, "weight", None) is weight:
                raise CheckpointError(
                    f"{self.path}: {name} and {other} share one weight (tie_word_embeddings), so merging one would "
                    "change both"
                )

    def _module(self, model: nn.Module, path: str) -> tuple[nn.Module, str]:
        """Return a module and its name, by the name that it has now or had in earlier versions of transformers."""
        for name in _names(model, path):
            try:
                return model.get_submodule(name), name
            except AttributeError:
                continue
        raise CheckpointError(f"{self.path}: {WEIGHTS_FILE}: the model has no module {path}; is it another base model?")


def _names(model: nn.Module, path: str) -> Iterator[str]:
    yield path
    config: Any = getattr(model, "config", None)
    renamed = path
    for rule in get_checkpoint_conversion_mapping(getattr(config, "model_type", "")) or ():
        sources: Any = getattr(rule, "source_patterns", ())
        targets: Any = getattr(rule, "target_patterns", ())
        if len(sources) == len(targets) == 1 and "*" not in targets[0]:
            renamed = re.sub(sources[0], targets[0].removeprefix("^"), renamed)
    yield renamed
    yield renamed.replace("language_model.model.", "language_model.")
