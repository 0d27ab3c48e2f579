"""Check at load time whether a decoder can run with ragged attention, by a forward of a few tokens.

Decoders that need features missing in `models.backends.attention` are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from models.backends.states.layers import recurrent_layers
from models.loading.attention_calls import MARK, UNLIMITED_TOKENS, AttentionCall, first_hidden, recorded
from models.loading.checkpoints import CheckpointError, first_line

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rotary embedding types whose tables depend on the longest row of a batch."""
SUPPORTED_LAYERS = frozenset({"full_attention"})
WITHOUT_MIXING = frozenset({"mlp", "moe"})
"""Types of layers in which tokens do not depend on each other."""
UNSUPPORTED = {
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}
"""Keyword arguments of attention for unsupported features, and their names in error messages."""
NUM_TOKENS = 5
"""Number of tokens of the forward."""
LARGE_LOGIT = 1000.0
"""Magnitude to which logits are enlarged, far above the caps of output layers (15 to 50 in released models)."""
LARGEST_STATE = 16384.0
"""Largest magnitude of an enlarged state, within half precision."""


def check_decoder(
    model: nn.Module, decoder: nn.Module, head: nn.Module, name: str, max_context_tokens: int | None = None
) -> int | None:
    """Raise CheckpointError unless all layers use full attention and the logits are `head` of the decoder's states.

    Returns None, or `max_context_tokens` if this holds only in contexts that are not longer.
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
        with torch.inference_mode():
            ours, theirs = _large_logits(model, decoder, head, ids)
    except Exception as error:  # unknown architectures may raise any error on these arguments
        raise _refusal(name, f"its decoder does not take embeddings and positions ({first_line(error)})") from error
    limit = None
    reason = _unsupported(model, recording.calls, rotary, UNLIMITED_TOKENS)
    if reason and max_context_tokens is not None:
        limit, reason = max_context_tokens, _unsupported(model, recording.calls, rotary, max_context_tokens)
    if reason:
        raise _refusal(name, reason)
    silent = recurrent.keys() | {index for index, kind in others.items() if kind in WITHOUT_MIXING}
    if missing := sorted(
        set(range(config.num_hidden_layers)) - {call.layer for call in recording.calls if call.is_marked} - silent
    ):
        raise _refusal(name, f"its layers {', '.join(map(str, missing))} do not attend by transformers' interface")
    finite = ours.isfinite() & theirs.isfinite()
    difference = (ours - theirs).abs()[finite]
    if difference.numel() and float(difference.max()) > 1e-2 * float(theirs[finite].abs().max()):
        raise CheckpointError(f"{name}: cannot be run: its logits are not its output embedding over its last states")
    return limit


def parts_of(model: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """Return the decoder and the output embedding of a model; raises CheckpointError if it lacks either."""
    try:
        decoder: Any = model.get_decoder()  # type: ignore[operator]
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


def _refusal(name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{name}: cannot be run: {reason}, and every layer has to be plain full attention")


def _unsupported(model: nn.Module, calls: Sequence[AttentionCall], rotary: _Rotary, num_tokens: int) -> str | None:
    """Return what is not plain causal attention in contexts of `num_tokens`; None if all is."""
    uses = {UNSUPPORTED.get(word, f"the argument {word}") for call in calls for word in call.keywords}
    if any(call.window is not None and call.window < num_tokens for call in calls):
        uses.add("a sliding window")
    if any(call.rule is None for call in calls):
        uses.add("its own mask")
    if uses:
        return f"its attention uses {' and '.join(sorted(uses))}"
    rules = {call.rule: call.device for call in calls if call.rule is not None}
    try:
        limits = [first_hidden(rule, num_tokens, device) for rule, device in rules.items()]
    except Exception as error:  # functions of models may index tensors of the length of the prompt
        return f"its attention uses masks that depend on more than positions ({first_line(error)})"
    if shortest := min((limit for limit in limits if limit is not None), default=None):
        cause = "a sliding window or chunks: masks hide earlier tokens"
        return f"its attention uses {cause} in contexts of {shortest} tokens"
    config: Any = model.config
    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    windows = [getattr(layer, "sliding_window", None) for layer in cache.layers]
    num_kept = min((window for window in windows if window is not None), default=num_tokens)
    if num_kept < num_tokens:
        return f"the KV cache of its `generate` keeps a window of {num_kept} tokens"
    if rotary.depends_on_length(num_tokens - 1):
        return "its rotary positions depend on the longest row of a batch"
    return None


def _large_logits(model: nn.Module, decoder: nn.Module, head: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (1, N, V) of `head` and of the model for token ids (1, N), with the decoder's states enlarged until
    logits reach `LARGE_LOGIT`, so that caps of the logits show."""
    states: list[Tensor] = []

    def enlarge(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> None:
        hidden = out.last_hidden_state
        scale = LARGE_LOGIT / head(hidden).abs().max().float().clamp_min(1e-6)
        largest = LARGEST_STATE / hidden.abs().max().float().clamp_min(1e-6)
        out.last_hidden_state = hidden * torch.minimum(scale, largest).to(hidden.dtype)
        states.append(out.last_hidden_state)

    handle = decoder.register_forward_hook(enlarge)
    try:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return head(states[0]), logits


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
