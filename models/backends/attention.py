"""Run decoders over KV cache rows of different lengths, with an attention implementation of transformers.

Target and drafter models run under `attend`. The reference implementation uses torch's scaled dot-product attention
under a tree mask; a backend's kernel replaces it (`AttentionStep.kernel`).

Example of a tree mask: a row has 3 committed KV positions; the tree is root 0 with children 1 and 2, and 3 below 1.
Node j is written to position 3 + j. `visible` is ancestors-or-self. Row i of the mask is "all committed positions, then
`visible[i]`":

    node 0:  1 1 1 | 1 0 0 0
    node 1:  1 1 1 | 1 1 0 0
    node 2:  1 1 1 | 1 0 1 0        siblings 1 and 2 never see each other
    node 3:  1 1 1 | 1 1 0 1
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from models.backends.attention_probe import AttentionProbe
from models.backends.cache import RaggedCache
from models.backends.mask_rules import LayerRule, refuse_unknown, rules_of, tree_rule
from models.backends.rule_attention import attend_prompt, weigh
from models.backends.states.layers import running
from models.backends.states.memory import StatesStep

IMPLEMENTATION = "draftfleet_ragged"


class AttentionKernel(Protocol):
    """Attention kernel of a backend, for all layers of one forward."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: AttentionStep,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V (r, H_kv, N, D_h) to the cache; return the attention output (r, N, H, D_h).

        `softcap` and `sinks` (H,) are as for `models.backends.rule_attention.weigh`.
        """
        ...

    def on(self, device: torch.device) -> AttentionKernel:
        """Return this kernel for layers on another device."""
        ...


@dataclass(frozen=True)
class AttentionStep:
    """KV positions that the r rows of one forward write and read.

    `columns` (r, N): KV positions to write. `mask` (r, 1, N, window) is added to the scores: 0 for positions that a
    node attends to, −inf elsewhere, in the dtype of the states; None for a prefill, which is causal over the new tokens
    only. If `kernel` is set, it runs instead of torch's scaled dot-product attention. `index` are the blocks and
    offsets to write, by default those of `rows` and `columns`, see `RaggedCache.locate`. `states` is what recurrent
    layers read and write, None if there are none. `masks` replace `mask` in layers whose rule hides earlier positions.
    `groups` (r, L) are the blocks of tokens of a prefill, see `LayerRule.prompt_mask`.
    """

    cache: RaggedCache
    rows: Tensor
    columns: Tensor
    mask: Tensor | None
    window: int
    num_leading_rows: int | None
    probe: AttentionProbe | None = None
    kernel: AttentionKernel | None = None
    index: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]
    states: StatesStep | None = None
    masks: Mapping[LayerRule, Tensor] = field(default_factory=dict)
    groups: Tensor | None = None
    _on_device: dict[torch.device, AttentionStep] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.index:
            object.__setattr__(self, "index", self.cache.locate(self.rows, self.columns))

    @property
    def is_prefill(self) -> bool:
        """Whether rows attend causally to the new tokens only."""
        return self.mask is None and self.kernel is None

    def mask_of(self, layer: int) -> Tensor | None:
        """Return the mask of a layer."""
        if not self.masks:
            return self.mask
        return self.masks.get(tree_rule(self.cache.rule_of(layer)), self.mask)

    def on(self, device: torch.device) -> AttentionStep:
        """Return a copy for layers on another device, created once per device; cache and probe are shared."""
        if device == self.rows.device:
            return self
        if device not in self._on_device:
            mask = None if self.mask is None else self.mask.to(device)
            kernel = None if self.kernel is None else self.kernel.on(device)
            self._on_device[device] = replace(
                self,
                rows=self.rows.to(device),
                columns=self.columns.to(device),
                mask=mask,
                kernel=kernel,
                index=(self.index[0].to(device), self.index[1].to(device)),
                masks={rule: bias.to(device) for rule, bias in self.masks.items()},
                groups=None if self.groups is None else self.groups.to(device),
                _on_device={},
            )
        return self._on_device[device]


def ancestors(parents: Tensor) -> Tensor:
    """Return the ancestors-or-self of every node: `parents` (b, N), −1 for nodes without a parent, → bool (b, N, N).

    Uses pointer doubling: each round doubles the number of known ancestors, so 65 nodes take 7 rounds at any depth.
    """
    b, num_nodes = parents.shape
    itself = torch.arange(num_nodes, device=parents.device)
    # The root points to itself.
    jump = torch.where(parents >= 0, parents, itself)
    reach = (itself[:, None] == itself).expand(b, -1, -1)
    for _ in range((num_nodes - 1).bit_length()):
        reach = reach | reach.gather(1, jump[:, :, None].expand(-1, -1, num_nodes))
        jump = jump.gather(1, jump)
    return reach


def tree_mask(lens: Tensor, visible: Tensor, window: int) -> Tensor:
    """Return which KV positions each node reads: `lens` (r,), scratch `visible` (r, N, M) → bool (r, 1, N, window)."""
    _, num_nodes, num_scratch = visible.shape
    offset = torch.arange(window, device=lens.device)[None] - lens[:, None]  # (r, window), < 0 is committed
    inside = (offset >= 0) & (offset < num_scratch)
    index = offset.clamp(0, num_scratch - 1)[:, None].expand(-1, num_nodes, -1)
    scratch = visible.gather(2, index) & inside[:, None]
    return ((offset < 0)[:, None] | scratch)[:, None]


def mask_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to a bias added to the scores: 0 for True, −inf for False."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    lanes: AttentionStep | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Write K and V (r, H_kv, N, D_h) and return the attention output (r, N, H, D_h), as transformers expects it.

    `softcap` and the sinks `s_aux` (H,) are as for `models.backends.rule_attention.weigh`. Windows are rules of the KV
    cache, which were recorded from masks; `sliding_window` is not read. Raises: TypeError for unknown arguments.
    """
    assert lanes is not None, "an engine uses this model: call it through models.kv.lanes, not directly"
    refuse_unknown(others)
    layer: int = module.layer_idx  # type: ignore[assignment]
    rule = lanes.cache.rule_of(layer)
    num_rows, num_heads, num_nodes, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    is_special = softcap is not None or s_aux is not None
    if lanes.kernel is not None:
        extras = (softcap, s_aux) if is_special else ()
        return lanes.kernel.attend(layer, query, key, value, lanes, scale, *extras), None
    if rule.owner is None:
        lanes.cache.write(layer, lanes.index, key, value)
    if lanes.mask is None:
        if lanes.probe is not None:
            lanes.probe.add(query, key, scaling, rule, lanes.groups, softcap, s_aux)
        if is_special or (rule.in_blocks and lanes.groups is not None) or not rule.is_causal_within(num_nodes):
            return attend_prompt(query, key, value, rule, lanes.groups, scale, softcap, s_aux), None
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2), None
    owner = layer if rule.owner is None else rule.owner
    keys, values = lanes.cache.read(owner, lanes.rows, lanes.num_leading_rows, lanes.window)
    mask = lanes.mask_of(layer)
    assert mask is not None
    if is_special:
        return weigh(query, keys, values, mask, scale, softcap, s_aux).transpose(1, 2), None
    groups = num_heads // keys.shape[1]
    if groups > 1:
        # Query heads of one group become extra query rows, so K and V are read once and not repeated.
        query = query.reshape(num_rows, keys.shape[1], groups * num_nodes, head_dim)
        mask = mask.repeat(1, 1, groups, 1)
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return mixed.reshape(num_rows, num_heads, num_nodes, values.shape[3]).transpose(1, 2), None


# transformers builds no mask for this name because no mask function is registered under it.
AttentionInterface.register(IMPLEMENTATION, attend)


class LayerInputs:
    """Records the inputs (r, N, D) of the decoder layers `wanted` during one forward, as a context manager."""

    def __init__(self, layers: Sequence[nn.Module], wanted: Sequence[int]) -> None:
        self._layers = layers
        self._wanted = wanted
        self._found: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> LayerInputs:
        for index in self._wanted:
            hook = functools.partial(self._record, index)
            self._hooks.append(self._layers[index].register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.add(index, args[0] if args else kwargs["hidden_states"])

    def add(self, index: int, hidden: Tensor) -> None:
        """Record the input of layer `index` if it is wanted."""
        if index in self._wanted:
            self._found[index] = hidden

    def behind(self, last: Tensor) -> Tensor:
        """Return `last` (r, N, D) with the n recorded inputs appended in order of `wanted`, (r, N, D · (1 + n))."""
        if not self._wanted:
            return last
        # Layers of a model on several devices have their states there.
        return torch.cat([last, *(self._found[index].to(last.device) for index in self._wanted)], dim=-1)


def run_decoder(
    decoder: nn.Module,
    embeds: Tensor,
    positions: Tensor,
    step: AttentionStep,
    extra: dict[str, Any],
    wanted: Sequence[int] = (),
) -> Tensor:
    """Run embedded inputs (r, N, D) at positions (r, N) or (3, r, N); returns the last hidden states (r, N, D).

    The inputs of the n layers `wanted` are appended: (r, N, D · (1 + n)).
    """
    inputs = LayerInputs(decoder.layers if wanted else (), wanted)  # type: ignore[arg-type]
    with inputs, nullcontext() if step.states is None else running(step.states):
        out = decoder(
            inputs_embeds=embeds, position_ids=positions, attention_mask=None, use_cache=False, lanes=step, **extra
        )
    return inputs.behind(out.last_hidden_state)


def some_layers(decoder: nn.Module, indices: Sequence[int]) -> nn.Module:
    """Return a decoder that runs only the layers `indices`; it shares all modules, and layers keep their KV cache."""
    every: nn.ModuleList = decoder.layers  # type: ignore[assignment]
    layers = [every[index] for index in indices]
    first, last = next(decoder.parameters()).device, layers[-1]
    if next(last.parameters()).device != first:
        # In a model on several devices, only the decoder's own last layer returns its states to the first device.
        last = layers[-1] = copy.copy(last)
        last._forward_hooks = last._forward_hooks.copy()
        last.register_forward_hook(lambda _layer, _args, out: _on_device(out, first))
    view = copy.copy(decoder)
    view._modules = dict(decoder._modules)
    view.layers = nn.ModuleList(layers)
    config: Any = decoder.config
    if getattr(config, "hidden_size_per_layer_input", 0) or any(rule.owner is not None for rule in rules_of(decoder)):
        raise ValueError("layers that share K and V, or have inputs of their own, cannot be skipped")
    if types := getattr(config, "layer_types", None):
        # Decoders choose masks, rotary embeddings and kinds by the place of a layer in `layers`.
        view.config = copy.copy(config)
        view.config.layer_types = [types[index] for index in indices]  # type: ignore[union-attr]
        view.config.num_hidden_layers = len(indices)  # type: ignore[union-attr]
    return view


def _on_device(out: Any, device: torch.device) -> Any:
    """Move a layer's output, a tensor or a tuple of tensors, to a device."""
    return out.to(device) if isinstance(out, Tensor) else tuple(_on_device(part, device) for part in out)


class DecoderRunner:
    """Run a decoder eagerly. Backends subclass it; one runner serves any number of KV caches."""

    mode = "eager"
    """Execution mode of forwards, for provenance."""
    is_compiled = False
    is_captured = False

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        config: Any = decoder.config
        if config._attn_implementation != IMPLEMENTATION:
            decoder.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]

    def __call__(
        self,
        embeds: Tensor,
        positions: Tensor,
        step: AttentionStep,
        extra: dict[str, Any],
        wanted: Sequence[int] = (),
    ) -> Tensor:
        """See `run_decoder`."""
        return run_decoder(self.decoder, embeds, positions, step, extra, wanted)

    def of_layers(self, indices: Sequence[int]) -> DecoderRunner:
        """Return a runner of only the layers `indices`, in ascending order, over the KV caches of this runner."""
        return DecoderRunner(some_layers(self.decoder, indices))

    def output_layer(self, head: nn.Module) -> nn.Module:
        """Return the output layer for use with this runner, such as one with packed weights; here `head` itself."""
        return head
