"""Sizes of `benchmarks.gpu`: full for a GPU, tiny to run the code without one."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.inflate.shapes import SHAPES, Shape, drafter_shape


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    size: int


@dataclass(frozen=True)
class Sizes:
    """`rounds` are timed passes over `requests_per_slot` prompts per slot; `checked` outputs of inflated models are
    compared with their source's; an image has `grid` × `grid` codes; `long` are visual positions and their batch sizes,
    timed for `steps` at the forced acceptance `rates`."""

    dtype: str
    target: Shape
    drafter: Shape
    gamma: int
    batches: tuple[int, ...]
    requests_per_slot: int
    max_new_tokens: int
    rounds: int
    checked: int
    copy_bytes: int
    attention_rows: int
    attention_columns: int
    attention_nodes: tuple[int, ...]
    attention_heads: tuple[Heads, ...]
    attention_calls: int
    image: Shape
    grid: int
    images: int
    long: tuple[tuple[int, tuple[int, ...]], ...]
    rates: tuple[float, ...]
    steps: int


FULL = Sizes(
    dtype="bfloat16",
    target=SHAPES["7B"],
    drafter=drafter_shape(SHAPES["7B"], 0.05),
    gamma=5,
    batches=(1, 8, 32, 64),
    requests_per_slot=4,
    max_new_tokens=64,
    rounds=3,
    checked=4,
    copy_bytes=4 << 30,
    attention_rows=32,
    attention_columns=2048,
    attention_nodes=(1, 6, 16),
    attention_heads=(Heads(64, 64, 64), Heads(28, 4, 128)),  # the inflated 7B's and Qwen2.5-VL-7B's
    attention_calls=32,
    image=SHAPES["XL"],
    grid=24,
    images=32,
    long=((2_000, (1, 32)), (25_000, (1, 4))),
    rates=(0.6, 0.8),
    steps=24,
)
TINY = Sizes(
    dtype="float32",
    target=Shape(256, 4, 4, 4, 512),
    drafter=Shape(64, 2, 1, 1, 256),
    gamma=3,
    batches=(1, 3),
    requests_per_slot=2,
    max_new_tokens=8,
    rounds=2,
    checked=1,
    copy_bytes=1 << 20,
    attention_rows=2,
    attention_columns=64,
    attention_nodes=(1, 4),
    attention_heads=(Heads(4, 2, 16),),
    attention_calls=2,
    image=Shape(64, 5, 2, 2, 192),
    grid=3,
    images=2,
    long=((30, (1, 2)),),
    rates=(0.8,),
    steps=2,
)
