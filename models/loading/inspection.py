"""Check at load time whether a decoder can run with ragged attention, by a forward of a few tokens.

The masks of this forward become the rules of the layers, see `models.loading.layers.layer_rules`. Decoders that need
features missing in `models.backends.attention` are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from models.backends.mask_rules import LayerRule, set_rules
from models.backends.states.layers import recurrent_layers
from models.loading.checkpoints import CheckpointError, first_line
from models.loading.layers.attention_calls import MARK, UNLIMITED_TOKENS, AttentionCall, recorded
from models.loading.layers.layer_rules import UnsupportedMask, rules_from_calls
from models.loading.output_layer import output_layer

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rotary embedding types whose tables depend on the longest row of a batch."""
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
WITHOUT_MIXING = frozenset({"mlp", "moe"})
"""Types of layers in which tokens do not depend on each other."""
NUM_TOKENS = 5
"""Number of tokens of the forward."""


def check_decoder(
    model: nn.Module, decoder: nn.Module, head: nn.Module, name: str, max_context_tokens: int | None = None
) -> tuple[nn.Module, int | None]:
    """Record the rules of the layers of `decoder`, and return the function from its states to logits, see
    `models.loading.output_layer`.

    The second result is None, or `max_context_tokens` if the model can be run only in contexts that are not longer.
    Raises: CheckpointError if a layer is no causal attention with a window or chunks, or if logits are another function
    of the states.
    """
    config: Any = decoder.config
    types = [getattr(module, "rope_type", None) for module in decoder.modules()]
    kinds = {str(kind) for value in types for kind in (value.values() if isinstance(value, dict) else [value])}
    if unsupported := sorted(kinds & LENGTH_DEPENDENT):
        raise CheckpointError(
            f"{name}: cannot be run: its rotary positions are of type {' and '.join(unsupported)}, whose table "
            "depends on the longest row of a batch"
        )
    recurrent = recurrent_layers(decoder)
    layer_types = dict(enumerate(getattr(config, "layer_types", None) or ()))
    others = {index: kind for index, kind in layer_types.items() if index not in recurrent}
    if unknown := sorted({str(kind) for kind in others.values()} - SUPPORTED_LAYERS - WITHOUT_MIXING):
        raise _refusal(name, f"it has layers of type {', '.join(unknown)}")
    ids = torch.arange(NUM_TOKENS, device=next(decoder.parameters()).device)[None]
    rotary = _Rotary(decoder)
    try:
        with torch.inference_mode(), recorded(decoder) as recording, rotary:
            embeds = decoder.get_input_embeddings()(ids)  # type: ignore[operator]
            marked = {MARK: True}
            out = decoder(inputs_embeds=embeds, position_ids=ids, attention_mask=None, use_cache=False, **marked)
            head(out.last_hidden_state)
    except Exception as error:  # unknown architectures may raise any error on these arguments
        raise _refusal(name, f"its decoder does not take embeddings and positions ({first_line(error)})") from error
    given = (model, recording.calls, rotary, config.num_hidden_layers)
    limit = None
    try:
        rules = _rules(*given, UNLIMITED_TOKENS)
    except UnsupportedMask as unlimited:
        if max_context_tokens is None:
            raise _refusal(name, str(unlimited)) from None
        limit = max_context_tokens
        try:
            rules = _rules(*given, max_context_tokens)
        except UnsupportedMask as error:
            raise _refusal(name, str(error)) from None
    longest = _longest_unscaled(decoder)
    if longest is not None:
        if max_context_tokens is not None and max_context_tokens > longest:
            raise CheckpointError(
                f"{name}: cannot be run: from position {longest} on it multiplies queries by a temperature; set "
                f"max_context_tokens to at most {longest}"
            )
        limit = longest if limit is None else min(limit, longest)
    silent = recurrent.keys() | {index for index, kind in others.items() if kind in WITHOUT_MIXING}
    if missing := sorted(
        set(range(config.num_hidden_layers)) - {call.layer for call in recording.calls if call.is_marked} - silent
    ):
        raise _refusal(name, f"its layers {', '.join(map(str, missing))} do not attend by transformers' interface")
    set_rules(decoder, rules)
    with torch.inference_mode():
        return output_layer(model, decoder, head, ids, name), limit


def parts_of(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """Return the decoder and the output embedding of a model; raises CheckpointError if it lacks either."""
    try:
        decoder: Any = model.get_decoder()  # type: ignore[operator]
        if decoder.get_output_embeddings() is not None:
            decoder = decoder.model  # Llama 4 returns its language model, with the output embedding
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        ready = decoder.get_input_embeddings() is not None and decoder.config.num_hidden_layers > 0
        ready = ready and head is not None and head.weight.dim() == 2
    except (AttributeError, NotImplementedError, TypeError):
        ready = False
    if not ready:
        raise CheckpointError(
            f"{name}: cannot be run: transformers shows no decoder with input embeddings and layers behind one output "
            f"embedding in {type(model).__name__}"
        )
    return decoder, head


def _longest_unscaled(decoder: nn.Module) -> int | None:
    """Return the longest context in which no layer multiplies queries by a temperature that depends on the length of
    the KV cache, as Llama 4 does in layers without rotary embeddings; None if no layer does."""
    spans = [
        int(module.floor_scale) - 1  # type: ignore[arg-type]
        for module in decoder.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    ]
    return min(spans, default=None)


def _refusal(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: cannot be run: {reason}; the engine runs layers of causal attention over all earlier tokens, a "
        "window or a chunk"
    )


def _rules(
    model: nn.Module, calls: Sequence[AttentionCall], rotary: _Rotary, num_layers: int, num_tokens: int
) -> list[LayerRule]:
    """Return the rules of the layers in contexts of `num_tokens`; raises UnsupportedMask if there are none."""
    rules = rules_from_calls(calls, num_layers, num_tokens)
    config: Any = model.config
    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    for rule, layer in zip(rules, cache.layers, strict=False):
        kept = getattr(layer, "sliding_window", None)
        read = min(size for size in (rule.window, rule.chunk, num_tokens) if size is not None)
        if kept is not None and kept < read:
            raise UnsupportedMask(
                f"the KV cache of its `generate` keeps a window of {kept} tokens, and its masks hide no tokens"
            )
    if rotary.depends_on_length(num_tokens - 1):
        raise UnsupportedMask("its rotary positions depend on the longest row of a batch")
    return rules


class _Rotary:
    """Records the calls of a decoder's rotary embeddings, as a context manager."""

    def __init__(self, decoder: nn.Module) -> None:
        modules = (module for module in decoder.modules() if hasattr(module, "rope_type"))
        self._modules = [module for module in modules if not any(True for _ in module.parameters())]
        self._calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        def note(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._calls.append((module, args, keywords))

        self._handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in self._modules]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def depends_on_length(self, last: int) -> bool:
        """Return whether the rotary table of a position changes if a row has the position `last`."""
        for call in self._calls:
            try:
                far = _table(*call, last)
            except (IndexError, RuntimeError):
                continue  # a table without this position, which no context reaches
            pairs = zip(_table(*call, NUM_TOKENS), far, strict=True)
            if not all(torch.allclose(short, long, rtol=1e-3, atol=1e-3) for short, long in pairs):
                return True
        return False


def _table(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], last: int) -> list[Tensor]:
    """Return the rotary table of all but the last of `NUM_TOKENS` positions, the last of which is `last`.

    Rotary embeddings keep the longest length that they have seen, so a copy is run. It has no weights.
    """

    def place(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_floating_point() and value.shape[-1:] == (NUM_TOKENS,):
            moved = value + 1
            moved[..., -1] = last
            return moved
        return value

    with torch.inference_mode():
        out = copy.deepcopy(module)(*map(place, args), **{name: place(value) for name, value in keywords.items()})
    tables = out if isinstance(out, (tuple, list)) else (out,)
    return [table.narrow(list(table.shape).index(NUM_TOKENS), 0, NUM_TOKENS - 1) for table in tables]
