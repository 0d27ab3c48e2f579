"""Times transformers' `generate` over the target's weights, the baseline of `benchmarks.gpu`.

Modes: `eager` has a growing cache; `compiled` a static one and a compiled step in CUDA graphs, transformers' own choice
on a GPU. Prompts of similar lengths are batched together, padded on the left.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from transformers import CompileConfig, StaticCache

from benchmarks.gpu.decoding import HasTime, Row, measure_all
from benchmarks.gpu.models import EAGER, TextPair, peak_bytes
from benchmarks.gpu.sizes import Sizes
from benchmarks.harness.process import Outcome
from benchmarks.harness.verdict import make_row
from benchmarks.peers.transformers_peer import generate_all, set_greedy

COMPILED = "compiled"


def measure_generate(pair: TextPair, mode: str, sizes: Sizes, has_time: HasTime) -> dict[str, Any]:
    """Return a row for each batch size, and what was left out and why; compiled steps need a GPU."""
    model: Any = pair.targets[EAGER].model
    if mode == COMPILED and model.device.type != "cuda":
        return {"rows": [], "left_out": ["transformers' compiled steps: no GPU"]}
    set_greedy(model, False)
    measurements = {f"{mode}, batch {b}": partial(_measure, pair, mode, b, sizes, has_time) for b in sizes.batches}
    engines_attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        return measure_all(measurements, has_time)
    finally:
        model.set_attn_implementation(engines_attention)


def _measure(pair: TextPair, mode: str, batch: int, sizes: Sizes, has_time: HasTime) -> list[Row]:
    """Return the row of one mode and batch size; at least one pass is timed."""
    model: Any = pair.targets[EAGER].model
    count = batch * sizes.requests_per_slot
    prompts = pair.prompt_ids[:count]
    options: dict[str, Any] = {"do_sample": False}
    if mode == COMPILED:
        cache = StaticCache(model.config, max_cache_len=pair.max_context_tokens)
        options |= {"compile_config": CompileConfig(), "past_key_values": cache}

    def given(max_new_tokens: int) -> dict[str, Any]:
        if mode == COMPILED:
            options["past_key_values"].reset()
        return options | {"max_new_tokens": max_new_tokens}

    peak_bytes(model.device)
    # Compiles, and chooses kernels.
    generate_all(model, prompts[:batch], batch, lambda _: given(min(8, sizes.max_new_tokens)))
    passes: list[Outcome] = []
    while len(passes) < sizes.rounds and (not passes or has_time()):
        start = time.perf_counter()
        outputs = generate_all(model, prompts, batch, lambda _: given(sizes.max_new_tokens))
        passes.append(Outcome(time.perf_counter() - start, outputs))
    row = make_row(passes, pair.reference[:count], sizes.dtype, peak_bytes(model.device))
    return [{"batch": batch, "mode": mode, **row}]
