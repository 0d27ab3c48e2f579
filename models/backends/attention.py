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
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from models.backends.cache import RaggedCache
from models.backends.states.layers import running
from models.backends.states.memory import StatesStep

IMPLEMENTATION = "draftfleet_ragged"


class AttentionProbe:
    """Sum the attention weights of the marked `queries` (r, L) to each KV position over the layers of one prefill."""

    QUERY_CHUNK = 64
    """Queries per chunk; bounds the memory of the attention weights."""

    def __init__(self, queries: Tensor) -> None:
        self.queries = queries
        self.total = torch.zeros(queries.shape, dtype=torch.float32, device=queries.device)
        self.num_added = 0

    def add(self, query: Tensor, key: Tensor, scaling: float | None) -> None:
        """Add the causal attention of one layer: `query` (r, H, L, D_h), `key` (r, H_kv, L, D_h)."""
        _, num_heads, length, head_dim = query.shape
        scale = head_dim**-0.5 if scaling is None else scaling
        keys = key.repeat_interleave(num_heads // key.shape[1], dim=1).float()
        column = torch.arange(length, device=query.device)
        for start in range(0, length, self.QUERY_CHUNK):
            some = query[:, :, start : start + self.QUERY_CHUNK].float()
            row = column[start : start + self.QUERY_CHUNK]
            scores = (some @ keys.transpose(2, 3) * scale).masked_fill(row[:, None] < column, -torch.inf)
            marked = self.queries[:, None, start : start + self.QUERY_CHUNK, None].to(scores.device)
            self.total += (scores.softmax(-1) * marked).sum(dim=(1, 2)).to(self.total.device)
        self.num_added += num_heads

    def mean(self) -> Tensor:
        """Return the mean weight over layers, heads and marked queries, (r, L)."""
        return self.total / (self.num_added * self.queries.sum(1, keepdim=True).clamp_min(1))


class AttentionKernel(Protocol):
    """Attention kernel of a backend, for all layers of one forward."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: AttentionStep, scale: float
    ) -> Tensor:
        """Write K and V (r, H_kv, N, D_h) to the cache; return the attention output (r, N, H, D_h)."""
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
    layers read and write, None if there are none.
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
    _on_device: dict[torch.device, AttentionStep] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.index:
            object.__setattr__(self, "index", self.cache.locate(self.rows, self.columns))

    @property
    def is_prefill(self) -> bool:
        """Whether rows attend causally to the new tokens only."""
        return self.mask is None and self.kernel is None

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
    **_: Any,
) -> tuple[Tensor, None]:
    """Write K and V (r, H_kv, N, D_h) and return the attention output (r, N, H, D_h), as transformers expects it."""
    assert lanes is not None, "an engine uses this model: call it through models.kv.lanes, not directly"
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_rows, num_heads, num_nodes, head_dim = query.shape
    scale = head_dim**-0.5 if scaling is None else scaling
    if lanes.kernel is not None:
        return lanes.kernel.attend(layer, query, key, value, lanes, scale), None
    lanes.cache.write(layer, lanes.index, key, value)
    if lanes.mask is None:
        if lanes.probe is not None:
            lanes.probe.add(query, key, scaling)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2), None
    keys, values = lanes.cache.read(layer, lanes.rows, lanes.num_leading_rows, lanes.window)
    groups = num_heads // keys.shape[1]
    mask = lanes.mask
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
    kinds = getattr(decoder.config, "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        # Decoders read the type of a layer at its place among the layers that run.
        config: Any = copy.copy(decoder.config)
        config.layer_types, config.num_hidden_layers = [kinds[index] for index in indices], len(indices)
        view.config = config
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
