"""The keys of a checkpoint's files that make transformers load code or reach a network, and how each is treated.

A dropped key is removed before transformers sees the file, so that the setting of this project holds. A refused key
cannot be dropped, because a class of transformers reads the file itself, or the checkpoint is useless without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from files.strict_json import walk
from models.loading.names import is_plain_name

CONFIG = ("config.json",)
TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json")
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
KERNEL_METHODS = frozenset(("eetq", "fbgemm_fp8", "finegrained_fp8", "fp8", "gguf", "metal", "mxfp4", "mxfp8", "nvfp4"))
"""Quantization methods of transformers that run kernels from the hub, unless they dequantize the weights."""
TIMM_SOURCES = frozenset(("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"))
"""Arguments of timm's `create_model` that read weights from a hub or a pickle."""
Owner = Mapping[str, Any]


def _always(_value: Any, _owner: Owner) -> bool:
    return True


def _is_set(value: Any, _owner: Owner) -> bool:
    return value not in (None, False, "", [], {})


def _runs_kernels(value: Any, owner: Owner) -> bool:
    return value in KERNEL_METHODS and owner.get("dequantize") is not True


def _leaves_the_files(value: Any, _owner: Owner) -> bool:
    ends = (".safetensors", ".safetensors.index.json")
    return value is not None and not (is_plain_name(value) and str(value).endswith(ends))


def _names_a_source(value: Any, _owner: Owner) -> bool:
    return isinstance(value, str) and any(mark in value for mark in ":/")


def _reads_weights(value: Any, _owner: Owner) -> bool:
    return isinstance(value, dict) and any(value.get(name) for name in TIMM_SOURCES)


def _is_text(value: Any, _owner: Owner) -> bool:
    return isinstance(value, str)


@dataclass(frozen=True)
class Rule:
    """Treatment of a key at any depth of some files, if `applies(value, object that has the key)`.

    `effect` completes "a value makes transformers …"; rules with `is_code` do not apply if remote code is allowed.
    """

    keys: tuple[str, ...]
    files: tuple[str, ...]
    treatment: Literal["dropped", "refused"]
    effect: str
    applies: Callable[[Any, Owner], bool] = _is_set
    is_code: bool = False


RULES = (
    Rule(
        (
            "_attn_implementation",
            "attn_implementation",
            "_attn_implementation_internal",
            "_attn_implementation_autoset",
        ),
        CONFIG,
        "dropped",
        "run a kernel from the hub as attention, also per part of the model",
        _always,
    ),
    Rule(
        ("_experts_implementation", "experts_implementation", "_experts_implementation_internal"),
        CONFIG,
        "dropped",
        "run a kernel from the hub for the experts, also per part of the model",
        _always,
    ),
    Rule(
        ("use_kernels", "_use_kernels", "kernel_config"),
        CONFIG,
        "dropped",
        "run kernels from the hub as layers",
        _always,
    ),
    Rule(("fusion_config",), CONFIG, "dropped", "replace modules of all models of the process", _always),
    Rule(("use_pretrained_backbone",), CONFIG, "dropped", "fetch the weights of a backbone from the hub", _always),
    Rule(
        ("auto_map", "custom_pipelines", "trust_remote_code"),
        CONFIG,
        "dropped",
        "run code of the checkpoint or of another repository",
        _always,
        is_code=True,
    ),
    Rule(
        ("_name_or_path", "name_or_path", "_commit_hash", "base_model_name_or_path"),
        CONFIG,
        "dropped",
        "take another repository for the checkpoint's own",
        _always,
    ),
    Rule(("configuration_files",), CONFIG, "refused", "read another file in place of config.json"),
    Rule(("transformers_weights",), CONFIG, "refused", "read weights outside of the checked files", _leaves_the_files),
    Rule(("backbone",), CONFIG, "refused", "fetch a backbone or its configuration from the hub", _is_text),
    Rule(("architecture",), CONFIG, "refused", "fetch a timm model from the hub", _names_a_source),
    Rule(
        ("model_args",), CONFIG, "refused", "read the weights of a timm model from the hub or a pickle", _reads_weights
    ),
    Rule(("quant_method",), CONFIG, "refused", "run quantization kernels from the hub", _runs_kernels),
    Rule(("fast_tokenizer_files",), TOKENIZER, "refused", "read another file in place of tokenizer.json"),
    Rule(
        ("gguf_file", "vocab", "merges", "tokenizer_object", "init_inputs"),
        TOKENIZER,
        "refused",
        "read any file of this machine as a vocabulary",
    ),
    Rule(
        ("audio_tokenizer", "audio_tokenizer_class", "audio_tokenizer_name_or_path"),
        (*PROCESSOR, "audio_tokenizer_config.json"),
        "refused",
        "load a second model from the hub or any folder",
    ),
    Rule(
        ("class_info_file", "repo_path", "repo_or_path"),
        PROCESSOR,
        "refused",
        "fetch class names or voices from the hub",
    ),
    Rule(("is_vqa",), PROCESSOR, "refused", "fetch a font from the hub"),
    Rule(("apply_ocr",), PROCESSOR, "refused", "start a program that reads text in images"),
)
FORBIDDEN_FILES = {
    "adapter_config.json": "it belongs to an adapter, whose weights and base model transformers would load from any "
    "folder or the hub; merge the adapter into the weights and remove the file"
}
"""File name → why a checkpoint with this file is refused."""


class KeyRefused(ValueError):
    """Raised for a refused key or file; the message is a part of a sentence about the checkpoint."""


def treat(settings: dict[str, Any], file: str, allow_remote_code: bool) -> None:
    """Drop keys from the parsed JSON object of a settings file in place; raises KeyRefused for a refused key."""
    rules = [
        (key, rule)
        for rule in RULES
        if file in rule.files and not (rule.is_code and allow_remote_code)
        for key in rule.keys
    ]
    for path, owner in walk(settings):
        for key, rule in rules:
            if key not in owner or not rule.applies(owner[key], owner):
                continue
            if rule.treatment == "refused":
                dotted, value = ".".join((*path, key)), json.dumps(owner[key])
                raise KeyRefused(
                    f"its {file} sets {dotted[:200]} to {value[:80]}, which would make transformers {rule.effect}"
                )
            del owner[key]
