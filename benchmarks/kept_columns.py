"""How much of the pictures a pruned drafter still sees: the share of the world's cells with at least one kept column.

Why guided pruning accepts less than uniform pruning where several pictures share the budget. Owns the count; knows no
acceptance. A picture is a square of visual columns, in which the world's 3 × 3 cells are squares.
"""

from __future__ import annotations

import math

from torch import Tensor

from actors.loading.method import build_method
from actors.loading.pair import load
from benchmarks.scenarios import Case
from configs.schema import CaptionJob
from decoding import Engine, Request, Sampling
from decoding.contracts import Context, Probe
from decoding.drafters import ModelDrafter
from models.inputs.prefix import Prefix
from models.target import Target
from zoo.world.scene import GRID

SLOTS, MAX_CONTEXT_TOKENS = 16, 768


class Watched:
    """A pruned context that notes which visual columns of each prompt it keeps, found by their rotary positions."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.needs_attention = context.needs_attention
        self.kept: dict[str, list[int]] = {}

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        pruned = self.context.build(request, probe, model)
        whole = model.encode(request.prompt, request.images, request.videos)
        self.kept[request.sample_id] = columns_left(whole, pruned)
        return pruned


def columns_left(whole: Prefix, pruned: Prefix) -> list[int]:
    """Numbers of the visual columns of `whole` that `pruned` still has; their positions are kept as they were."""
    places = {int(place): number for number, place in enumerate(_places(whole).tolist())}
    return [places[int(place)] for place in _places(pruned).tolist()]


def _places(prefix: Prefix) -> Tensor:
    return prefix.positions.reshape(-1, prefix.positions.shape[-1])[0][prefix.visual]


def seen_cells(kept: list[int], num_columns: int, num_images: int) -> float:
    """Share of the cells of all images in which a kept column lies."""
    per_image = num_columns // num_images
    side = math.isqrt(per_image)
    cells = set()
    for column in kept:
        image, place = divmod(column, per_image)
        row, across = divmod(place, side)
        cells.add((image, row * GRID // side, across * GRID // side))
    return len(cells) / (num_images * GRID * GRID)


def count_seen_cells(job: CaptionJob, scenarios: dict[str, list[Case]]) -> dict[str, float]:
    """The mean share of cells seen by the drafter of `job`, by scenario; scenarios without pictures are left out."""
    pair, found = load(job), {}
    for name, cases in scenarios.items():
        if not cases[0].images:
            continue
        method = build_method(job.method, pair.drafter, pair.target)
        assert isinstance(method.drafter, ModelDrafter)
        watched = Watched(method.drafter.contexts[0])
        method.drafter.contexts = (watched,)
        engine = Engine(pair.target, method, SLOTS, MAX_CONTEXT_TOKENS)
        requests = [
            Request(case.case_id, pair.render(case.messages), case.images, Sampling(max_new_tokens=2), 0)
            for case in cases
        ]
        sizes = {
            request.sample_id: int(pair.target.encode(request.prompt, request.images, ()).visual.sum())
            for request in requests
        }
        failed = [one.error for one in engine.run(requests) if one.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} cases failed, the first with: {failed[0]}")
        shares = [seen_cells(watched.kept[case.case_id], sizes[case.case_id], len(case.images)) for case in cases]
        found[name] = sum(shares) / len(shares)
    return found
