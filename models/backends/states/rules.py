"""Rules of recurrent layers: how the functions that a stock layer calls read and write the states of rows.

The layers of transformers call a causal convolution and a recurrent function, and are given no cache. Each rule
replaces one of these functions during a forward of the engine. It calls the function of transformers itself, or the
kernel that transformers selects: over whole prompts in its form for chunks, over the nodes of a step in its form for
single tokens, so that N nodes give what N steps of one token give. A token with β = 0 and g = 0 (dt = 0 in Mamba 2)
leaves a state unchanged, bit by bit; padding and nodes that were not accepted are such tokens.

Shapes: r rows, N tokens, H heads, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.backends.states.memory import StatesStep

Function = Callable[..., Any]


def convolve(
    step: StatesStep,
    original: Function,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Run a causal convolution over inputs (r, channels, N) behind the last inputs of each row."""
    before, num_tokens = weight.shape[-1] - 1, hidden_states.shape[-1]
    memory = step.states.conv_of(step, hidden_states, before)
    known, numbers = step.read(memory), torch.arange(before, device=memory.device)
    if step.is_prefill:
        inputs = torch.cat([known[..., :before], hidden_states], dim=-1)
        # Each row is cut at its own length: padding is not among the last inputs.
        ends = num_tokens if step.lengths is None else step.lengths.to(memory.device)[:, None]
        step.write_nodes(memory.transpose(1, 2), 0, _columns(inputs, ends + numbers).transpose(1, 2))
    elif step.offset:
        inputs = torch.cat([known[..., step.offset : step.offset + before], hidden_states], dim=-1)
        step.write_nodes(memory.transpose(1, 2), step.offset + before, hidden_states.transpose(1, 2))
    else:
        assert step.count is not None
        last = _columns(known, step.count.to(memory.device)[:, None] + numbers)
        inputs = torch.cat([last, hidden_states], dim=-1)
        step.write_nodes(memory.transpose(1, 2), 0, inputs.transpose(1, 2))
    out: Tensor = original(inputs, weight, bias, activation=activation)
    return out[..., before:]


def _columns(inputs: Tensor, columns: Tensor) -> Tensor:
    """Return the inputs (r, channels, M) at `columns`, (M,) or (r, M)."""
    return inputs.gather(2, columns.expand(inputs.shape[0], -1)[:, None].expand(-1, inputs.shape[1], -1))


def apply_delta(
    step: StatesStep,
    original: Function,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    recurrent: Function,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Run the gated delta rule (Yang et al. 2024, arXiv 2412.06464) over query, key (r, N, H_k, d_k), value (r, N, H_v,
    d_v), log decay `g` and `beta` (r, N, H_v)."""
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    memory = step.states.state_of(step, value, (value.shape[2], key.shape[3], value.shape[3]))
    state = step.read(memory)
    if step.is_prefill:
        if (real := step.is_real(value.shape[1], value.device)) is not None:
            g, beta = torch.where(real[..., None], g, 0.0), torch.where(real[..., None], beta, 0.0)
        out, state = original(
            query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True, **options
        )
        step.write(memory, state)
        return out, None
    if step.memory.kept and (num_replayed := step.offset or step.num_replayed):
        kept = [step.read(step.memory.kept[name])[:, :num_replayed] for name in ("key", "value", "g", "beta")]
        if step.offset == 0:
            # Zeros, also for keys and values: a NaN of a rejected node times β = 0 is NaN.
            accepted = step.is_accepted(num_replayed, value.device)
            kept = [torch.where(accepted.view(*accepted.shape, *[1] * (part.dim() - 2)), part, 0.0) for part in kept]
        keys, values, decays, betas = kept
        _, state = recurrent(
            keys, keys, values, g=decays, beta=betas, initial_state=state, output_final_state=True, **options
        )
        if step.offset == 0:
            step.write(memory, state)
    out, _ = recurrent(query, key, value, g=g, beta=beta, initial_state=state, output_final_state=False, **options)
    step.states.keep(step, key=key, value=value, g=g, beta=beta)
    return out, None


def scan(
    step: StatesStep,
    original: Function,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    *,
    update: Function,
    **_: Any,
) -> Tensor:
    """Run Mamba 2 (Dao and Gu 2024, arXiv 2405.21060) over inputs (r, N, H, d), `dt` (r, N, H), `A` (H,), `B` and `C`
    (r, N, G, n)."""
    assert z is None, "gates inside a scan are not known"
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    num_tokens, num_heads, head_dim = hidden_states.shape[1:]
    memory = step.states.state_of(step, hidden_states, (num_heads, head_dim, B.shape[3]))
    state = step.read(memory)
    if step.is_prefill:
        dt = dt.clamp(min=dt_limit[0], max=dt_limit[1])
        if (real := step.is_real(num_tokens, dt.device)) is not None:
            dt = torch.where(real[..., None], dt, 0.0)
        options = {"chunk_size": chunk_size, "D": D, "initial_states": state, "return_final_states": True}
        out, state = original(hidden_states, dt, A, B, C, **options)
        step.write(memory, state)
        return out  # type: ignore[no-any-return]
    state = state.clone()  # `update` writes to it
    wide = A[:, None, None].expand(-1, head_dim, B.shape[3])
    skip = None if D is None else D[:, None].expand(-1, head_dim)

    def run(x: Tensor, times: Tensor, inputs: Tensor, outputs: Tensor, residual: Tensor | None) -> Tensor:
        times = times[..., None].expand(-1, -1, -1, head_dim)
        each = zip(*(part.unbind(1) for part in (x, times, inputs, outputs)), strict=True)
        return torch.stack([update(state, x, dt, wide, B, C, residual) for x, dt, B, C in each], dim=1)

    if step.memory.kept and (num_replayed := step.offset or step.num_replayed):
        kept = [step.read(step.memory.kept[name])[:, :num_replayed] for name in ("x", "dt", "B")]
        if step.offset == 0:
            accepted = step.is_accepted(num_replayed, dt.device)
            kept = [torch.where(accepted.view(*accepted.shape, *[1] * (part.dim() - 2)), part, 0.0) for part in kept]
        x, times, inputs = kept
        run(x, times, inputs, inputs, None)
        if step.offset == 0:
            step.write(memory, state)
    out = run(hidden_states, dt, B, C, skip)
    step.states.keep(step, x=hidden_states, dt=dt, B=B)
    return out
