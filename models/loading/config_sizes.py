"""Refuse sizes in a configuration that its weights cannot fill, before transformers builds anything from them.

transformers makes one object per layer, and a list per layer already with the configuration, so that a few digits cost
hours. Sizes are compared with the tensors that are stored; without weights, with fixed limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from files.strict_json import walk
from models.loading.weight_headers import Stored

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth", "num_decoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SQUARE_MASKS = frozenset(("bark", "clvp", "gpt_bigcode", "gpt_neo", "imagegpt", "openai-gpt"))
"""Architectures that allocate a mask of all positions times all positions."""
LIMITS: tuple[tuple[re.Pattern[str], int, str], ...] = (
    (re.compile(r"(?!max_window_)(\w+_)?(layers?|depth)"), 1024, "layers"),
    (re.compile(r"(\w+_)?(experts?|heads?|groups)"), 65_536, "experts, heads or groups"),
    (re.compile(r"num_labels"), 100_000, "labels"),
    (re.compile(r"grid"), 1024, "codes along a side"),
    (
        re.compile(r"(\w+_)?(hidden_size|intermediate_size|vocab_size|dim|d_model|d_ff|n_embd|n_inner)"),
        2**26,
        "numbers",
    ),
    (re.compile(r"(max|n|num|original_max)_\w*(position|ctx|length|len)\w*"), 2**27, "positions"),
    (re.compile(r".*"), 2**53, "of anything"),
)
"""Pattern of a key's name, largest value, and what it counts; the first pattern that matches holds."""
PROCESSOR_LIMITS: tuple[tuple[re.Pattern[str], int, str], ...] = (
    (re.compile(r"height|width"), 16_384, "pixels along a side"),
    (re.compile(r"(num|n)_\w*(tokens?|quer\w*)|\w*seq_len\w*|extra_ids|max_image_tiles|max_patches"), 65_536, "tokens"),
    (re.compile(r"(\w+_)?(edge|pixels)"), 2**28, "pixels"),
    (re.compile(r"(?!vocab_)\w*(size|frames|fps)"), 65_536, "pixels or frames"),
)
TOKEN_IDS = 2**24
"""Upper bound of token ids: converters of slow tokenizers make one token for each id below the largest."""
EXCESS = 3.0
MIN_ELEMENTS = 2**24
"""A configuration may ask for `EXCESS` times the stored elements, and `MIN_ELEMENTS` more, because layers are counted
roughly; the exact shapes are compared when the weights are loaded."""
PARAMETERS_PER_BYTE = 4
"""Parameters per stored byte of the narrowest quantized weights."""


class SizeRefused(ValueError):
    """Raised for sizes that are too large; the message is a part of a sentence about the checkpoint."""


def check_sizes(settings: Mapping[str, Any], stored: Stored | None) -> None:
    """Raise SizeRefused if `config.json` asks for more than fixed limits or than `stored`, the weights, can fill.

    Heads name sizes of their targets, whose weights they do not have, so they are compared with the limits only.
    """
    file = "config.json"
    for path, owner in walk(dict(settings)):
        positions = max((value for key, value in _numbers(owner) if "position" in key), default=0)
        if owner.get("model_type") in SQUARE_MASKS and positions > 16_384:
            raise SizeRefused(f"its {file} asks for a mask of {positions:,} x {positions:,} positions")
        layers = _first(owner, LAYERS)
        if stored is not None and layers > max(stored.num_tensors, 64):
            raise SizeRefused(
                f"its {file} asks for {layers:,} layers{_at(path)}, and its weights have {stored.num_tensors:,} tensors"
            )
        _check_limits(owner, path, file, LIMITS)
    if stored is not None:
        _check_parameters(settings, stored, file)


def check_processor_sizes(settings: Mapping[str, Any], file: str) -> None:
    """Raise SizeRefused if the settings of a tokenizer or processor ask for absurd sizes."""
    if file in ("config.json", "generation_config.json"):
        return
    for path, owner in walk(dict(settings)):
        if path[-1:] == ("added_tokens_decoder",) or file == "added_tokens.json":
            ids = [str(value) for value in (*owner, *owner.values()) if isinstance(value, (int, str))]
            if wrong := [entry for entry in ids if entry.isdecimal() and (len(entry) > 8 or int(entry) >= TOKEN_IDS)]:
                raise SizeRefused(f"its {file} has the token id {wrong[0][:80]}, and ids are below {TOKEN_IDS:,}")
            continue
        _check_limits(owner, path, file, PROCESSOR_LIMITS)


def _check_limits(
    owner: Mapping[str, Any], path: tuple[str, ...], file: str, limits: tuple[tuple[re.Pattern[str], int, str], ...]
) -> None:
    for key, value in _numbers(owner):
        bound = next(((limit, what) for pattern, limit, what in limits if pattern.fullmatch(key)), None)
        if bound is not None and abs(value) > bound[0]:
            dotted = ".".join((*path, key))[:200]
            raise SizeRefused(
                f"its {file} sets {dotted} to {value:,}, and at most {bound[0]:,} {bound[1]} are possible"
            )


def _check_parameters(settings: Mapping[str, Any], stored: Stored, file: str) -> None:
    """Compare a lower bound of the parameters that a configuration asks for with the stored elements."""
    needed = sum(_least_parameters(owner) for _, owner in walk(dict(settings)))
    is_quantized = any("quantization_config" in owner for _, owner in walk(dict(settings)))
    num_stored = stored.num_bytes * PARAMETERS_PER_BYTE if is_quantized else stored.num_elements
    if needed > EXCESS * num_stored + MIN_ELEMENTS:
        raise SizeRefused(
            f"its {file} asks for {needed:,} parameters or more, and its weights have {stored.num_elements:,} numbers"
        )


def _least_parameters(owner: Mapping[str, Any]) -> int:
    """Return a lower bound of the parameters of one model: token embedding, and two matrices of each layer, or one of
    each expert."""
    width, layers, inner = (_first(owner, names) for names in (WIDTHS, LAYERS, INNER))
    per_expert = _number(owner.get("moe_intermediate_size"))
    each_layer = min(2 * (inner or width), _first(owner, EXPERTS) * per_expert or 2**62)
    return width * (_number(owner.get("vocab_size")) + layers * each_layer)


def _numbers(owner: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    return ((key, int(value)) for key, value in owner.items() if type(value) in (int, float))


def _number(value: Any) -> int:
    return max(0, int(value)) if type(value) in (int, float) else 0


def _first(owner: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((number for name in names if (number := _number(owner.get(name)))), 0)


def _at(path: tuple[str, ...]) -> str:
    return f" in {'.'.join(path)[:200]}" if path else ""
