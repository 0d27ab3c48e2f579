"""Load checkpoints from a `save_pretrained` folder or a hub id: safetensors only, remote code off by default."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import get_video_processor_config

from files.local import open_regular
from models.inputs.chat_template import ChatTemplate, TemplateRefused, TemplateTooCostly
from models.inputs.video import VIDEO_PART, VideoSettingsError, video_part, without_torchvision
from models.loading.config_sizes import SizeRefused, check_sizes
from models.loading.hub import fetch_settings, fetch_weights, offline
from models.loading.placement import spread
from models.loading.quantization import quantise, why_not
from models.loading.settings import SettingsRefused, check_folder, read_settings, weight_files
from models.loading.weight_headers import HeaderError, Stored, stored_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
NEEDS_CODE = "it contains custom code, which runs only with allow_remote_code: true"
MAX_REASON_CHARS = 600
"""Characters of another library's message that are shown."""
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

    def fetched(self, fetch: Callable[[str, str | None], Path]) -> Path:
        """Return the folder; `fetch` downloads one for a hub id and a revision. Raises CheckpointError if it fails, or
        for a `path` that is neither."""
        if self.is_folder:
            return Path(self.path)
        if self.path.startswith(("/", ".", "~")) or self.path.count("/") != 1:
            path = self.path or "an empty path"
            raise CheckpointError(f"{path}: no such folder (and not a hub id of the form owner/name)")
        try:
            return fetch(self.path, self.revision)
        except Exception as error:  # errors of the hub, the network and the disk
            raise CheckpointError(f"{self.path}: it cannot be fetched from the hub: {first_line(error)}") from error

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the keyword arguments of transformers' loaders for `path`, whose files are in `folder`: they are read
        from there or from the cache of the hub, unless remote code may fetch what it imports."""
        revision = None if self.is_folder else folder.name
        is_local = not self.allow_remote_code
        return {"revision": revision, "trust_remote_code": self.allow_remote_code, "local_files_only": is_local}


def read_config(ref: CheckpointRef) -> PreTrainedConfig:
    """Read the `config.json` of a checkpoint, without the dropped keys of `config_keys`.

    Raises CheckpointError if the architecture is unknown, a key is refused, or the weights cannot fill the sizes.
    """
    folder, settings_by_path = _checked(ref)
    settings = settings_by_path.get("config.json")
    if settings is None:
        raise CheckpointError(f"{ref.path}: it holds no config.json, so it is not what save_pretrained writes")
    kind = settings.get("model_type")
    if not isinstance(kind, str | None):
        raise CheckpointError(f"{ref.path}: model_type in its config.json must be text, not {kind!r}")
    if kind not in CONFIG_MAPPING and not (settings.get("auto_map") and ref.allow_remote_code):
        if read_settings(folder / "config.json").get("auto_map"):
            raise CheckpointError(f"{ref.path}: {NEEDS_CODE}")
        known_to = f"transformers {transformers.__version__}"
        reason = f"{known_to} does not know its architecture {kind!r}" if kind else "its config.json has no model_type"
        raise CheckpointError(f"{ref.path}: {reason}")
    try:
        check_sizes(settings, _stored(ref, folder))
    except SizeRefused as error:
        raise CheckpointError(f"{ref.path}: {error}") from None
    try:
        with _reading(ref):
            config = _config_of(ref, folder, settings)
    except Exception as error:  # each configuration class raises its own errors for wrong values
        raise CheckpointError(f"{ref.path}: its config.json cannot be read: {first_line(error)}") from error
    if not ref.is_folder:
        config._commit_hash = folder.name
    return config


def _config_of(ref: CheckpointRef, folder: Path, settings: dict[str, Any]) -> PreTrainedConfig:
    """Build the configuration from the settings that are left; remote code reads its own file."""
    if ref.allow_remote_code and settings.get("auto_map"):
        config = transformers.AutoConfig.from_pretrained(ref.path, **ref.options(folder))
        config._attn_implementation = config._experts_implementation = None
        return config
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "config.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    config.name_or_path = ref.path
    return config


def _checked(ref: CheckpointRef) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return the folder of a checkpoint, downloaded without weights from the hub, and its settings by file name."""
    folder = ref.fetched(partial(fetch_settings, with_code=ref.allow_remote_code))
    try:
        return folder, check_folder(folder, ref.allow_remote_code)
    except (SettingsRefused, OSError) as error:
        reason = f"its files cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        raise CheckpointError(f"{ref.path}: {reason}") from None


def _reading(ref: CheckpointRef) -> contextlib.AbstractContextManager[None]:
    """Return a context without network; remote code that may run may also fetch what it imports."""
    return contextlib.nullcontext() if ref.allow_remote_code else offline()


def read_processor(ref: CheckpointRef, config: PreTrainedConfig) -> Any:
    """Read the processor of a vision-language checkpoint, or the tokenizer of a text checkpoint."""
    loader: Any = transformers.AutoProcessor if is_vision_language(config) else AutoTokenizer
    own_class: Any = PROCESSOR_MAPPING.get(type(config), None)
    folder, _ = _checked(ref)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{ref.path}: it holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    try:
        with _reading(ref):
            if loader is transformers.AutoProcessor and own_class and VIDEO_PART in own_class.get_attributes():
                processor = _read_with_own_video_part(ref, folder, own_class)
            else:
                processor = loader.from_pretrained(ref.path, **ref.options(folder))
    except Exception as error:  # the tokenizers library raises bare exceptions for broken files
        if "trust_remote_code" in str(error):
            raise CheckpointError(f"{ref.path}: {NEEDS_CODE}") from None
        raise CheckpointError(f"{ref.path}: its processor cannot be read: {first_line(error)}") from error
    try:
        if (template := ChatTemplate.of(processor)) is not None:
            template.probe()
    except (TemplateRefused, TemplateTooCostly) as error:
        raise CheckpointError(f"{ref.path}: its chat template is refused: {first_line(error)}") from None
    return processor


def _read_with_own_video_part(ref: CheckpointRef, folder: Path, processor_class: Any) -> Any:
    """Read a processor with a `VideoProcessor`, or without a video processor if its settings are unsupported."""
    loaders: dict[str, Any] = {"image_processor": transformers.AutoImageProcessor, "tokenizer": AutoTokenizer}
    options = ref.options(folder)
    parts: dict[str, Any] = dict.fromkeys(processor_class.get_attributes())
    for part in parts.keys() - {VIDEO_PART}:
        parts[part] = loaders[part].from_pretrained(ref.path, **options)
    with suppress(VideoSettingsError):
        settings = get_video_processor_config(ref.path, revision=options["revision"])
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
    merge: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Load a model in evaluation mode onto `device`; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    With `others`, the layers are spread over these devices too; other models use `reserved_bytes` of `device`.
    `quantization` is a key of `models.loading.quantization.KINDS`, or "none". `merge` changes the weights first.
    """
    loader = model_loader(config)
    known = is_vision_language(config) or config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not known and not ref.allow_remote_code:
        name = config.model_type
        raise CheckpointError(f"{ref.path}: its architecture {name!r} generates no text from text or images")
    attention = attention_of(config)
    model = load_pretrained(ref, config, loader, dtype, use_safetensors=True, attn_implementation=attention)
    if merge is not None:
        merge(model)
    if quantization != "none":
        _quantise(ref, model.get_decoder(), device, quantization)  # type: ignore[operator]
    if not others:
        return model.to(device)
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    if len(getattr(decoder, "layers", ())) != decoder.config.num_hidden_layers:
        raise CheckpointError(f"{ref.path}: its layers cannot be identified, so it runs on one device only")
    spread(model, decoder, (device, *others), reserved_bytes)
    return model


def model_loader(config: PreTrainedConfig) -> Any:
    """Return transformers' Auto class of a target."""
    if is_vision_language(config):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def attention_of(config: PreTrainedConfig) -> str:
    """Return the attention implementation of transformers for a model before the engine replaces it: torch's, or the
    plain one for models with soft caps or sinks, which torch's does not compute."""
    mapping = transformers.AutoModel._model_mapping
    classes = [mapping.get(type(part), None) for part in (config, config.get_text_config(decoder=True))]
    return "sdpa" if all(getattr(made, "_supports_sdpa", True) for made in classes) else "eager"


def load_pretrained(
    ref: CheckpointRef, config: PreTrainedConfig, loader: Any, dtype: str, use_safetensors: bool, **options: Any
) -> nn.Module:
    """Load a model in evaluation mode with an Auto class `loader` of transformers; `dtype` as in `load_weights`.

    `config` is that of `read_config`. Without `use_safetensors`, weights in torch's own format are accepted too.
    """
    folder = ref.fetched(partial(fetch_weights, pickled=not use_safetensors))
    _check_weight_files(ref, folder, use_safetensors)
    options |= ref.options(folder) | {"dtype": DTYPES.get(dtype, "auto"), "output_loading_info": True}
    options |= {"use_safetensors": use_safetensors or None, "config": config}
    try:
        with _reading(ref):
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


def _stored(ref: CheckpointRef, folder: Path) -> Stored | None:
    """Count what the weight files of a folder hold, after a check of their names and headers."""
    try:
        for index in sorted(folder.glob("*.index.json")):
            weight_files(index)
        return stored_weights(folder)
    except (HeaderError, SettingsRefused) as error:
        raise CheckpointError(f"{ref.path}: {error}") from None


def _check_weight_files(ref: CheckpointRef, folder: Path, use_safetensors: bool) -> None:
    """Raise CheckpointError unless a folder has weight files that may be read, with sound names and headers."""
    _stored(ref, folder)
    if not any(folder.glob("*.safetensors")) and use_safetensors:
        if pickles := sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES):
            raise CheckpointError(
                f"{ref.path}: its weights are pickled ({pickles[0]}), and opening a pickle can run any code; only "
                "safetensors are read"
            )
        raise CheckpointError(f"{ref.path}: it holds no .safetensors weights")


def is_vision_language(config: PreTrainedConfig) -> bool:
    """Return whether transformers has an image-text-to-text model class for this architecture."""
    return config.model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def revision_of(ref: CheckpointRef, config: PreTrainedConfig) -> str:
    """Return an identifier of the weights: the hub commit, or `sampled_digest` over a folder's files."""
    if not ref.is_folder:
        return str(config._commit_hash)
    suffixes = {".json", ".safetensors", ".jinja", ".model", ".txt"}
    return sampled_digest(file for file in sorted(Path(ref.path).iterdir()) if file.suffix in suffixes)


def sampled_digest(files: Iterable[Path]) -> str:
    """Hash names, sizes, the first MiB and the last 64 KiB of files, without reading large weights completely.

    The first MiB contains shapes; the end distinguishes retrained weights of equal shapes. Raises CheckpointError for a
    file that cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            with open_regular(file) as stream:
                head, size = stream.read(1 << 20), stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - (1 << 16)))
                digest.update(f"{file.name}:{size}:".encode() + head + stream.read())
        except OSError as error:
            raise CheckpointError(f"{file}: it cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()[:16]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most `MAX_REASON_CHARS` long, or the name of its type."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return (str(error).strip() or type(error).__name__).splitlines()[0][:MAX_REASON_CHARS].rstrip(":. ")
