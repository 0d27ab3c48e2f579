"""Load checkpoints from a `save_pretrained` folder or a hub id: safetensors only, remote code off by default."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import get_video_processor_config

from models.inputs.video import VIDEO_PART, VideoSettingsError, video_part, without_torchvision
from models.loading.names import is_plain_name
from models.loading.placement import spread
from models.loading.quantization import quantise, why_not

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class CheckpointError(ValueError):
    """Raised by all functions that read or check model files; the message names the checkpoint."""


@dataclass(frozen=True)
class CheckpointRef:
    """Reference to a model: `path` is a folder or a hub id, `revision` a hub commit."""

    path: str
    revision: str | None = None
    allow_remote_code: bool = False

    # os.path does not raise for names that are too long or in unreadable folders, unlike pathlib.
    @property
    def is_folder(self) -> bool:
        return bool(self.path) and os.path.isdir(self.path)

    @property
    def is_file(self) -> bool:
        return os.path.isfile(self.path)

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' loaders; raises CheckpointError for an invalid `path`."""
        if not self.is_folder and (self.path.startswith(("/", ".", "~")) or self.path.count("/") != 1):
            path = self.path or "an empty path"
            raise CheckpointError(f"{path}: no such folder (and not a hub id of the form owner/name)")
        return {"revision": self.revision, "trust_remote_code": self.allow_remote_code}


def read_config(ref: CheckpointRef) -> PreTrainedConfig:
    """Read the `config.json` of a checkpoint; raises CheckpointError if the architecture is unknown."""
    options = ref.options()
    if ref.is_folder and not (Path(ref.path) / "config.json").is_file():
        raise CheckpointError(f"{ref.path}: it holds no config.json, so it is not what save_pretrained writes")
    try:
        settings, _ = PreTrainedConfig.get_config_dict(ref.path, revision=ref.revision)
        kind, brings_code = settings.get("model_type"), bool(settings.get("auto_map"))
    except Exception as error:  # unreachable hubs, broken JSON and JSON that is no object raise unrelated errors
        reason = "it is no JSON object" if isinstance(error, AttributeError) else first_line(error)
        raise CheckpointError(f"{ref.path}: its config.json cannot be read: {reason}") from error
    if not isinstance(kind, str | None):
        raise CheckpointError(f"{ref.path}: model_type in its config.json must be text, not {kind!r}")
    if kind not in CONFIG_MAPPING and not (brings_code and ref.allow_remote_code):
        if brings_code:
            raise CheckpointError(f"{ref.path}: it contains custom code, which runs only with allow_remote_code: true")
        known_to = f"transformers {transformers.__version__}"
        reason = f"{known_to} does not know its architecture {kind!r}" if kind else "its config.json has no model_type"
        raise CheckpointError(f"{ref.path}: {reason}")
    try:
        return transformers.AutoConfig.from_pretrained(ref.path, **options)
    except Exception as error:  # each configuration class raises its own errors for wrong values
        raise CheckpointError(f"{ref.path}: its config.json cannot be read: {first_line(error)}") from error


def read_processor(ref: CheckpointRef, config: PreTrainedConfig) -> Any:
    """Read the processor of a vision-language checkpoint, or the tokenizer of a text checkpoint."""
    loader: Any = transformers.AutoProcessor if is_vision_language(config) else AutoTokenizer
    own_class: Any = PROCESSOR_MAPPING.get(type(config), None)
    if ref.is_folder and not any((Path(ref.path) / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{ref.path}: it holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    try:
        if loader is transformers.AutoProcessor and own_class is not None and VIDEO_PART in own_class.get_attributes():
            return _read_with_own_video_part(ref, own_class)
        return loader.from_pretrained(ref.path, **ref.options())
    except Exception as error:  # the tokenizers library raises bare exceptions for broken files
        raise CheckpointError(f"{ref.path}: its processor cannot be read: {first_line(error)}") from error


def _read_with_own_video_part(ref: CheckpointRef, processor_class: Any) -> Any:
    """Read a processor with a `VideoProcessor`, or without a video processor if its settings are unsupported."""
    loaders: dict[str, Any] = {"image_processor": transformers.AutoImageProcessor, "tokenizer": AutoTokenizer}
    options = ref.options()
    parts: dict[str, Any] = dict.fromkeys(processor_class.get_attributes())
    for part in parts.keys() - {VIDEO_PART}:
        parts[part] = loaders[part].from_pretrained(ref.path, **options)
    with suppress(VideoSettingsError):
        settings = get_video_processor_config(ref.path, revision=ref.revision)
        parts[VIDEO_PART] = video_part(processor_class, settings)
    settings, _ = processor_class.get_processor_dict(ref.path, **options)
    return without_torchvision(processor_class).from_args_and_dict(list(parts.values()), settings)


def load_weights(
    ref: CheckpointRef,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    others: Sequence[torch.device] = (),
    reserved_bytes: int = 0,
    quantization: str = "none",
) -> nn.Module:
    """Load a model in evaluation mode onto `device`; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    With `others`, the layers are spread over these devices too; other models use `reserved_bytes` of `device`.
    `quantization` is a key of `models.loading.quantization.KINDS`, or "none".
    """
    loader: Any = (
        transformers.AutoModelForImageTextToText if is_vision_language(config) else transformers.AutoModelForCausalLM
    )
    ref.options()  # refuses a path that is neither a folder nor a hub id
    known = is_vision_language(config) or config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not known and not ref.allow_remote_code:
        name = config.model_type
        raise CheckpointError(f"{ref.path}: its architecture {name!r} generates no text from text or images")
    if ref.is_folder:
        _check_weight_files(Path(ref.path))
    model = load_pretrained(ref, loader, dtype, use_safetensors=True, attn_implementation="sdpa")
    if quantization != "none":
        _quantise(ref, model.get_decoder(), device, quantization)  # type: ignore[operator]
    if not others:
        return model.to(device)
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    if len(getattr(decoder, "layers", ())) != decoder.config.num_hidden_layers:
        raise CheckpointError(f"{ref.path}: its layers cannot be identified, so it runs on one device only")
    spread(model, decoder, (device, *others), reserved_bytes)
    return model


def load_pretrained(ref: CheckpointRef, loader: Any, dtype: str, **options: Any) -> nn.Module:
    """Load a model in evaluation mode with an Auto class `loader` of transformers; `dtype` as in `load_weights`."""
    options |= ref.options() | {"dtype": DTYPES.get(dtype, "auto"), "output_loading_info": True}
    try:
        model, report = loader.from_pretrained(ref.path, **options)
    except Exception as error:  # OSError, ValueError, RuntimeError, UnpicklingError
        reason = first_line(error)
        if "ignore_mismatched_sizes" in reason:
            reason = "their shapes are not those that config.json asks for"
        raise CheckpointError(f"{ref.path}: its weights cannot be loaded: {reason}") from error
    if missing := sorted(report["missing_keys"]):
        # transformers initializes missing tensors randomly and only logs a warning.
        raise CheckpointError(f"{ref.path}: its weights lack {len(missing)} tensors, e.g. {missing[0]}")
    ready: nn.Module = model.requires_grad_(False).eval()
    return ready


def _quantise(ref: CheckpointRef, decoder: nn.Module, device: torch.device, kind: str) -> None:
    reason = why_not(device, next(decoder.parameters()).dtype, kind)
    if reason is None and quantise(decoder, kind) == 0:
        reason = "none of its layers is a plain linear one of a width that the kernel takes"
    if reason is not None:
        raise CheckpointError(f"{ref.path}: quantization: its weights cannot be {kind}: {reason}")


def check_index(where: str, index: Path) -> None:
    """Raise CheckpointError unless a shard index contains plain file names only, which cannot leave the folder."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: {index.name} is damaged: it maps no tensors to files") from error
    if wrong := [name for name in names if not is_plain_name(name)]:
        raise CheckpointError(f"{where}: {index.name} names {str(wrong[0])[:100]!r}, which is no plain file name")


def _check_weight_files(folder: Path) -> None:
    """Check the names and headers of a folder's weight files, so that errors name the file."""
    for index in sorted(folder.glob("*.index.json")):
        check_index(str(folder), index)
    files = sorted(folder.glob("*.safetensors"))
    if not files and (pickles := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)):
        raise CheckpointError(
            f"{folder}: its weights are pickled ({pickles[0]}), and opening a pickle can run any code; only "
            "safetensors are read"
        )
    if not files:
        raise CheckpointError(f"{folder}: it holds no .safetensors weights")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder}: {file.name} is torn or not safetensors ({first_line(error)})") from error


def is_vision_language(config: PreTrainedConfig) -> bool:
    """Return whether transformers has an image-text-to-text model class for this architecture."""
    return config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def revision_of(ref: CheckpointRef, config: PreTrainedConfig) -> str:
    """Return an identifier of the weights: the hub commit, or `sampled_digest` over a folder's files."""
    if not ref.is_folder:
        return str(getattr(config, "_commit_hash", None) or ref.revision or "main")
    suffixes = {".json", ".safetensors", ".jinja", ".model", ".txt"}
    return sampled_digest(file for file in sorted(Path(ref.path).iterdir()) if file.suffix in suffixes)


def sampled_digest(files: Iterable[Path]) -> str:
    """Hash names, sizes, the first MiB and the last 64 KiB of files, without reading large weights completely.

    The first MiB contains shapes; the end distinguishes retrained weights of equal shapes.
    """
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            head = stream.read(1 << 20)
            stream.seek(max(0, file.stat().st_size - (1 << 16)))
            digest.update(f"{file.name}:{file.stat().st_size}:".encode() + head + stream.read())
    return digest.hexdigest()[:16]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":. ")
