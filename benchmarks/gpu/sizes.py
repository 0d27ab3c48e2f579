"""Defines the sizes of `benchmarks.gpu`: full for a GPU, tiny to run the code without one."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.inflate.shapes import SHAPES, Shape, drafter_shape

DRAFTER = drafter_shape(SHAPES["7B"], 0.05)


@dataclass(frozen=True)
class Heads:
    query: int
    key: int
    size: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of all sections.

    `rounds` are timed passes over `requests_per_slot` prompts per slot; `checked` is the number of outputs of inflated
    models compared with their source's; `prompts` are rows and tokens of prefills; an image has `grid` × `grid` codes;
    `long` pairs visual positions with batch sizes, timed for `steps` at the forced acceptance `rates`.
    """

    dtype: str = "bfloat16"
    target: Shape = SHAPES["7B"]
    drafter: Shape = DRAFTER
    gamma: int = 5
    batches: tuple[int, ...] = (1, 8, 32, 64)
    eager_batches: tuple[int, ...] = (1,)
    requests_per_slot: int = 3
    max_new_tokens: int = 64
    rounds: int = 2
    checked: int = 4
    copy_bytes: int = 4 << 30
    attention_rows: int = 32
    attention_columns: int = 2048
    attention_nodes: tuple[int, ...] = (1, 6, 16)
    attention_heads: tuple[Heads, ...] = (Heads(64, 64, 64), Heads(28, 4, 128))  # the inflated 7B, Qwen2.5-VL-7B
    attention_calls: int = 32
    gemm_side: int = 8192
    prompts: tuple[tuple[int, int], ...] = ((8, 40), (1, 1024), (8, 1024), (4, 3000))
    image: Shape = SHAPES["XL"]
    grid: int = 24
    images: int = 32
    long: tuple[tuple[int, tuple[int, ...]], ...] = ((2_000, (1, 32)), (25_000, (1, 4)))
    rates: tuple[float, ...] = (0.6, 0.8)
    steps: int = 24


FULL = Sizes()
TINY = Sizes(
    dtype="float32",
    target=Shape(256, 4, 4, 4, 512),
    drafter=Shape(64, 2, 1, 1, 256),
    gamma=3,
    batches=(1, 3),
    eager_batches=(1, 3),
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
    gemm_side=64,
    prompts=((1, 12), (2, 12)),
    image=Shape(64, 5, 2, 2, 192),
    grid=3,
    images=2,
    long=((30, (1, 2)),),
    rates=(0.8,),
    steps=2,
)
