"""Times prefills of prompts of random embeddings, uncompiled and with fused layers.

`of_gemm` is the time of the parameters' multiplications at the speed of a large GEMM, over the prefill's time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.decoding import HasTime, Row, measure_all
from benchmarks.gpu.models import EAGER, FUSED, SEED, TextPair
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.clock import seconds_of
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch
from models.loading.checkpoints import DTYPES

REPEATS = 5
STEPS = (EAGER, FUSED)


def measure_prefill(pair: TextPair, sizes: Sizes, gemm_flop_per_s: float, has_time: HasTime) -> dict[str, Any]:
    """Return a row for each size of a prefill and each step, and what was left out and why."""
    measurements = {
        f"{rows} × {tokens} tokens": partial(_measure, pair, rows, tokens, sizes, gemm_flop_per_s)
        for rows, tokens in sizes.prompts
    }
    return measure_all(measurements, has_time)


@torch.inference_mode()
def _measure(pair: TextPair, num_rows: int, num_tokens: int, sizes: Sizes, gemm_flop_per_s: float) -> list[Row]:
    """Return one row for each of STEPS; last states differ by rounding, whose size relative to the largest is noted."""
    device = next(pair.targets[EAGER].decoder.parameters()).device
    generator = torch.Generator(device).manual_seed(SEED)
    embeddings: Tensor = pair.targets[EAGER].decoder.get_input_embeddings().weight  # type: ignore[operator]
    shape = (num_rows, num_tokens)
    token_ids = torch.randint(len(embeddings), shape, generator=generator, device=device)
    positions = torch.arange(num_tokens, device=device)
    visual = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    prompts = [[Prefix(ids, embeddings[ids].to(DTYPES[sizes.dtype]), positions, visual)] for ids in token_ids]
    slots = SlotBatch(torch.arange(num_rows, device=device), tuple(range(num_rows)), (0,) * num_rows)
    flop = pair.facts["target"]["num_parameters"] * 2 * num_rows * num_tokens
    rows, states = [], {}
    for step in STEPS:
        lanes = pair.targets[step].lanes(num_rows, 1, num_tokens + 1)
        run: Callable[[], Any] = partial(lanes.admit, slots, prompts, keep_hidden=False)
        run()  # allocates the KV cache, uncompiled
        seconds = seconds_of(run, device, REPEATS)
        states[step] = run().last.float()
        largest = states[EAGER].abs().max()
        rows.append(
            {
                "rows": num_rows,
                "tokens": num_tokens,
                "step": step,
                "seconds": seconds,
                "tokens_per_s": num_rows * num_tokens / seconds,
                "of_gemm": flop / gemm_flop_per_s / seconds,
                "difference": ((states[step] - states[EAGER]).abs().max() / largest).item(),
            }
        )
    return rows
