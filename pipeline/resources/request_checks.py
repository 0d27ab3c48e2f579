"""Checks that a job's lengths, weights and memory can be had on its devices, before Ray starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from configs.load import ConfigError
from configs.schema import CaptionJobConfig, CheckpointConfig
from files.installation import shipped_model
from pipeline.resources.capacity import count_gpus
from pipeline.resources.machine import gpu_memory_bytes, memory_bytes

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


def check_requests(config: CaptionJobConfig) -> None:
    """Raise ConfigError if no row fits the context, or the weights have a format that their device does not multiply.
    The GPUs of the job are resolved."""
    _check_lengths(config)
    target, pool = config.model.target, config.pool
    if pool.gpus or target.quantization == "none":
        return
    there = "pool.num_gpus is 0, so models run on the CPU"
    if target.quantization == "fp8":
        raise ConfigError(
            f"model.target.quantization: fp8 takes a GPU, and {there}; set it to int8 with model.target.dtype "
            "bfloat16, or to none"
        )
    if target.dtype in ("float32", "float16"):
        raise ConfigError(
            f"model.target.quantization: int8 on a CPU takes the dtype bfloat16, and {there}; set "
            f"model.target.dtype, which is '{target.dtype}', to bfloat16"
        )


def _check_lengths(config: CaptionJobConfig) -> None:
    """Raise ConfigError if `max_new_tokens` leaves no token for a prompt; columns may have lower values for rows."""
    new, context = config.sampling.max_new_tokens, config.pool.max_context_tokens
    if config.columns.max_new_tokens is None and new >= context:
        raise ConfigError(
            f"sampling.max_new_tokens: {new:,} tokens of output fill pool.max_context_tokens ({context:,}), so no "
            f"prompt fits; lower it, or raise pool.max_context_tokens above {new:,}"
        )


def check_memory(config: CaptionJobConfig, runs_here: bool) -> None:
    """Raise ConfigError if weights and KV caches of the actors that start together exceed the memory of this machine,
    or of the GPUs of an actor. Nothing is known if actors run elsewhere; checkpoints on the hub, in stores and of other
    shapes are not counted."""
    if not runs_here:
        return
    pool = config.pool
    models: list[CheckpointConfig] = [config.model.target]
    if config.model.drafter is not None and config.method.needs_checkpoint:
        models.append(config.model.drafter)
    sizes = [_size_of(model, quantized=model is config.model.target) for model in models]
    weights = sum(size[0] for size in sizes)
    slots = 1 if pool.slots == "auto" else pool.slots
    cache = slots * pool.max_context_tokens * sizes[0][1]
    actors = 1 if pool.gpus else pool.initial_size or pool.min_size
    if pool.gpus:
        gpus = gpu_memory_bytes()
        # A share of a GPU does not bound the memory of an actor.
        there, where = max(gpus, default=0) * max(1.0, pool.gpus), f"{count_gpus(pool.gpus)} of this machine"
    else:
        there, where = float(memory_bytes()), "this machine"
    if not there or actors * (weights + cache) <= there:
        return
    each = f" for each of {actors:,} actors (pool.min_size)" if actors > 1 else ""
    if actors * weights > there:
        which = "pool.num_gpus: more GPUs" if pool.gpus else "fewer actors"
        raise ConfigError(
            f"model.target.path: the weights need {_shown(weights)}{each}, and {where} has {_shown(there)}; "
            f"take {which}, a smaller model, or model.target.quantization"
        )
    dotted = "pool.max_context_tokens" if pool.slots == "auto" else "pool.slots"
    number = "1 slot" if slots == 1 else f"{slots:,} slots"
    raise ConfigError(
        f"{dotted}: {number} of {pool.max_context_tokens:,} tokens (pool.max_context_tokens) take {_shown(cache)} of "
        f"KV cache{each} beside {_shown(weights)} of weights, and {where} has {_shown(there)}; lower one of them"
    )


def _shown(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def _size_of(model: CheckpointConfig, quantized: bool) -> tuple[int, int]:
    """Return the bytes of a local model's weights, and of the keys and values of one position; zeros if unknown."""
    from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config
    from models.loading.weight_headers import HeaderError, stored_weights

    folder = Path(model.path) if Path(model.path).is_dir() else shipped_model(model.path)
    if folder is None:
        return 0, 0
    try:
        stored = stored_weights(folder)
        config = read_config(CheckpointRef(str(folder), None, model.allow_remote_code)).get_text_config()
    except (CheckpointError, HeaderError, OSError):  # refused with a reason where the checkpoint is opened
        return 0, 0
    if stored is None:
        return 0, 0
    as_stored = stored.num_bytes / max(1, stored.num_elements)
    element = ELEMENT_BYTES.get(model.dtype, as_stored)
    is_quantized = quantized and getattr(model, "quantization", "none") != "none"
    return int(stored.num_elements * (1 if is_quantized else element)), int(_position_elements(config) * element)


def _position_elements(config: Any) -> int:
    """Return the elements of keys and values of one position of a decoder; 0 if its configuration has no such names."""
    try:
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return (
            2 * int(config.num_hidden_layers) * int(getattr(config, "num_key_value_heads", None) or heads) * int(width)
        )
    except (AttributeError, TypeError, ZeroDivisionError):
        return 0
