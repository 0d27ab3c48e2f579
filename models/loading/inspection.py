"""Check at load time whether a decoder can run with ragged attention, by a forward of two tokens.

Decoders that need features missing in `models.backends.attention` are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from models.loading.checkpoints import CheckpointError, first_line

IMPLEMENTATION = "draftfleet_inspection"
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""Rotary embedding types whose tables depend on the longest row of a batch."""
SUPPORTED_LAYERS = frozenset({"full_attention"})
UNSUPPORTED = {
    "sliding_window": "a sliding window",
    "softcap": "soft-capped scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "attention_mask": "its own mask",
}
"""Keyword arguments of attention for unsupported features, and their names in error messages."""


Notes = list[tuple[int, set[str]]]
"""Layer index and unsupported keyword arguments of each call of attention."""


def check_decoder(model: nn.Module, decoder: nn.Module, head: nn.Module, name: str) -> None:
    """Raise CheckpointError unless all layers use full attention and the logits are `head` of the decoder's states."""
    config: Any = decoder.config
    types = [getattr(module, "rope_type", None) for module in decoder.modules()]
    kinds = {str(kind) for one in types for kind in (one.values() if isinstance(one, dict) else [one])}
    if unsupported := sorted(kinds & LENGTH_DEPENDENT):
        raise CheckpointError(
            f"{name}: cannot be run: its rotary positions are of type {' and '.join(unsupported)}, whose table "
            "depends on the longest row of a batch"
        )
    layers = set(getattr(config, "layer_types", None) or SUPPORTED_LAYERS)
    if not layers <= SUPPORTED_LAYERS:
        raise _refusal(name, f"it has layers of type {', '.join(sorted(layers - SUPPORTED_LAYERS))}")
    notes: Notes = []
    ids = torch.tensor([[0, 1]], device=next(decoder.parameters()).device)
    before = config._attn_implementation
    try:
        decoder.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
        with torch.inference_mode():
            embeds = decoder.get_input_embeddings()(ids)  # type: ignore[operator]
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            out = decoder(
                inputs_embeds=embeds, position_ids=positions, attention_mask=None, use_cache=False, notes=notes
            )
            ours = head(out.last_hidden_state)
            theirs = model(input_ids=ids, use_cache=False).logits
        decoder.set_attn_implementation(before)  # type: ignore[operator]
    except Exception as error:  # unknown architectures may raise any error on these arguments
        raise _refusal(name, f"its decoder does not take embeddings and positions ({first_line(error)})") from error
    if keywords := set[str]().union(*(words for _, words in notes)):
        raise _refusal(name, f"its attention uses {' and '.join(sorted(UNSUPPORTED[word] for word in keywords))}")
    if missing := sorted(set(range(config.num_hidden_layers)) - {layer for layer, _ in notes}):
        raise _refusal(name, f"its layers {', '.join(map(str, missing))} do not attend by transformers' interface")
    finite = ours.isfinite() & theirs.isfinite()
    difference = (ours - theirs).abs()[finite]
    if difference.numel() and float(difference.max()) > 1e-2 * float(theirs[finite].abs().max()):
        raise CheckpointError(f"{name}: cannot be run: its logits are not its output embedding over its last states")


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


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    notes: Notes | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Record the arguments of an attention call and return zeros (1, N, H, D_h), as transformers expects it."""
    if notes is not None:
        given = keywords | {"attention_mask": attention_mask}  # the caller passes no mask
        notes.append((int(module.layer_idx), {word for word in UNSUPPORTED if given.get(word) is not None}))  # type: ignore[arg-type]
    batch, heads, nodes, _ = query.shape
    return value.new_zeros(batch, nodes, heads, value.shape[3]), None


# No mask function is registered under this name, so transformers builds no mask of its own.
AttentionInterface.register(IMPLEMENTATION, _note)
