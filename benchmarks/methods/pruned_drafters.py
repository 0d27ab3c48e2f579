"""Measures pruned drafters alone: a rule that accepts every draft, and the share of the image cells they see."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actors.loading.method import build_method
from actors.loading.pair import load
from benchmarks.harness.engines import run_requests
from benchmarks.methods.scenarios import Case
from configs.schema import CaptionJob
from decoding import Engine, Request, Sampling
from decoding.acceptance.walk import target_choice
from decoding.contracts import Acceptance, Context, Judgement, Probe
from decoding.drafters import ModelDrafter
from decoding.tree import Verdict
from models.inputs.prefix import Prefix
from models.target import Target
from zoo.world.scene import GRID

SLOTS, MAX_CONTEXT_TOKENS = 16, 768


class FollowDrafter(Acceptance):
    """Accept every draft of a chain, the last one as the token after the path, so that the target adds no token.

    The target chooses the first token (prefill) and the token of a step without drafts. No job can choose this rule.
    Raises ValueError if a tree is not a chain.
    """

    lossless = False

    def judge(self, judgement: Judgement) -> Verdict:
        tree = judgement.tree
        if not tree.is_chain:
            raise ValueError("a drafter can be followed along chains only")
        choice = target_choice(judgement)
        num_drafts = tree.valid[:, 1:].long().cumprod(dim=1).sum(dim=1)
        n = num_drafts.clamp_min(1)
        place = torch.arange(tree.num_levels + 1, device=n.device)
        path = torch.where(place < n[:, None], place, 0)
        last = tree.tokens.gather(1, num_drafts[:, None])[:, 0]
        return Verdict(path, n, torch.where(num_drafts > 0, last, choice[:, 0]), path > 0)


class Watched(Context):
    """A pruned context that records the visual tokens kept of each prompt, identified by their rotary positions."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.needs_attention = context.needs_attention
        self.kept: dict[str, list[int]] = {}
        self.num_visual: dict[str, int] = {}

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        pruned = self.context.build(request, probe, model)
        whole = _places(model.encode(request.prompt, request.images, request.videos))
        numbers = {int(place): number for number, place in enumerate(whole.tolist())}
        self.kept[request.sample_id] = [numbers[int(place)] for place in _places(pruned).tolist()]
        self.num_visual[request.sample_id] = len(whole)
        return pruned


def _places(prefix: Prefix) -> Tensor:
    return prefix.positions.reshape(-1, prefix.positions.shape[-1])[0][prefix.visual]


def seen_cells(kept: list[int], num_columns: int, num_images: int) -> float:
    """Return the share of the 3 × 3 grid cells of all images that contain a kept visual token.

    `kept` are indices into `num_columns` visual tokens.
    """
    per_image = num_columns // num_images
    side = math.isqrt(per_image)
    cells = set()
    for column in kept:
        image, place = divmod(column, per_image)
        row, across = divmod(place, side)
        cells.add((image, row * GRID // side, across * GRID // side))
    return len(cells) / (num_images * GRID * GRID)


def count_seen_cells(job: CaptionJob, scenarios: dict[str, list[Case]]) -> dict[str, float]:
    """Return the mean share of grid cells seen by the drafter of `job`, by scenario with images."""
    pair, found = load(job), {}
    for name, cases in scenarios.items():
        if not cases[0].images:
            continue
        method = build_method(job.method, pair.drafter, pair.target)
        assert isinstance(method.drafter, ModelDrafter)
        watched = Watched(method.drafter.contexts[0])
        method.drafter.contexts = (watched,)
        engine = Engine(pair.target, method, SLOTS, MAX_CONTEXT_TOKENS)
        sampling = Sampling(max_new_tokens=2)
        run_requests(engine, [Request(c.case_id, pair.render(c.messages), c.images, sampling, 0) for c in cases])
        shares = [seen_cells(watched.kept[c.case_id], watched.num_visual[c.case_id], len(c.images)) for c in cases]
        found[name] = sum(shares) / len(shares)
    return found
