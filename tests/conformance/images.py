"""Checks of every method on image models. Tests run them, and planted faults must make them fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact, Lantern
from decoding.contracts import Drafter
from decoding.drafters import JacobiDrafter, LayerSkipDrafter, MedusaDrafter, NoDrafter, SuffixDrafter
from decoding.noise import Noise, Stream, key_of
from decoding.trees import Chain, DynamicTree, StaticTree, branching_paths
from models.heads.medusa import MedusaHeads, MedusaShape
from models.llamagen.neighbours import Proximity, nearest_codes
from models.llamagen.target import LlamaGenTarget
from tests.conformance import checks
from tests.llamagen_reference import greedy
from tests.toys import images

MODES = {
    "greedy": Sampling(),
    "greedy-guided": Sampling(guidance_scale=4.0),
    "sampled-guided": Sampling(temperature=0.8, top_k=20, top_p=0.9, guidance_scale=4.0),
    "sampled-interval": Sampling(temperature=1.1, top_k=12, guidance_scale=9.0, guidance_interval=5),
}
Make = Callable[[LlamaGenTarget, str], Method]


def medusa(of: LlamaGenTarget) -> Drafter:
    torch.manual_seed(3)
    heads = MedusaHeads(MedusaShape(3, 1, of.hidden_size, of.vocab_size)).to(of.device)
    return MedusaDrafter(heads, of.num_lanes, images.merge_of(of))


NEIGHBOURS = nearest_codes(torch.randn(images.CODES, 8, generator=torch.Generator().manual_seed(2)), 59, Proximity())
METHODS: dict[str, Make] = {
    "plain": lambda of, kind: Method(NoDrafter(), Chain(1), Exact()),
    "eagle2": lambda of, kind: Method(images.eagle(of), DynamicTree(4, 3, 16), Exact()),
    "eagle3": lambda of, kind: Method(images.eagle3(of), DynamicTree(4, 3, 16), Exact()),
    "sd-chain": lambda of, kind: Method(images.smaller(of, kind), Chain(5), Exact()),
    "sd-tree": lambda of, kind: Method(images.smaller(of, kind), StaticTree(branching_paths([3, 2, 1])), Exact()),
    "sd-dynamic": lambda of, kind: Method(images.smaller(of, kind), DynamicTree(4, 3, 16), Exact()),
    "layer-skip": lambda of, kind: Method(LayerSkipDrafter([0], merge=images.merge_of(of)), Chain(5), Exact()),
    "layer-skip-tree": lambda of, kind: Method(
        LayerSkipDrafter([1], merge=images.merge_of(of)), StaticTree(branching_paths([3, 2, 1])), Exact()
    ),
    "medusa": lambda of, kind: Method(medusa(of), StaticTree(branching_paths([3, 2, 1])), Exact()),
    "jacobi": lambda of, kind: Method(JacobiDrafter(), Chain(5), Exact()),
    "jacobi-above": lambda of, kind: Method(JacobiDrafter(of.grid), Chain(6), Exact()),
    # A window larger than the rest of the image.
    "jacobi-wide": lambda of, kind: Method(JacobiDrafter(of.grid), Chain(20), Exact()),
    "suffix": lambda of, kind: Method(SuffixDrafter(), Chain(5), Exact()),
    "lantern-zero": lambda of, kind: Method(
        images.smaller(of, kind), DynamicTree(4, 3, 16), Lantern(NEIGHBOURS, 40, 0.0)
    ),
    "jacobi+lantern-zero": lambda of, kind: Method(JacobiDrafter(of.grid), Chain(6), Lantern(NEIGHBOURS, 40, 0.0)),
}


@cache
def _referenced(kind: str, index: int, mode: str, scale: float) -> tuple[int, ...]:
    request = next(r for i, r in enumerate(images.requests(kind, index + 1, MODES[mode])) if i == index)
    assert request.sampling.guidance_scale == scale
    key = torch.tensor([key_of(request.seed, request.sample_id, request.replica)])

    def draw(position: int, logits: Tensor) -> int:
        noise = Noise(key, torch.tensor([position]))
        return int((logits + noise.gumbel(Stream.TOKEN, torch.zeros(1, dtype=torch.long), len(logits))[0, 0]).argmax())

    choose = greedy if request.sampling.temperature == 0 else draw
    condition = request.condition if kind == "class" else torch.from_numpy(request.condition)
    return tuple(images.reference(kind).generate(condition, images.reference_sampling(request.sampling), choose))


def expected(kind: str, wanted: Sequence[Request], mode: str) -> dict[str, tuple[int, ...]]:
    """Codes of the slow single-image reference for `images.requests` of a mode."""
    return {r.sample_id: _referenced(kind, i, mode, r.sampling.guidance_scale) for i, r in enumerate(wanted)}


def check_equal(method: str, kind: str, slots: int, mode: str, count: int = 6) -> float:
    """Every image equals the reference's code for code; returns the mean acceptance length."""
    target = images.target(kind, guided=MODES[mode].guidance_scale > 1.0)
    engine = Engine(target, METHODS[method](target, kind), slots, 64)
    wanted = images.requests(kind, count, MODES[mode])
    done = checks.run(engine, wanted)
    reference = expected(kind, wanted, mode)
    for request in wanted:
        completion = done[request.sample_id]
        assert completion.token_ids == reference[request.sample_id], (method, kind, slots, mode, request.sample_id)
        assert completion.finish_reason == "length"
        checks.check_telemetry(completion)
    return sum(c.telemetry.mean_acceptance_length for c in done.values()) / count


SLOTS = (1, 4, 9)


def every_case() -> list[tuple[str, str, int, str]]:
    """The full product of method, kind of condition, batch and mode."""
    return list(product(METHODS, images.KINDS, SLOTS, MODES))


NARROW = Sampling(temperature=1.3, top_k=3, guidance_scale=2.0)
NUM_DRAWS = 3000


def joint_of_three_codes(make: Callable[[LlamaGenTarget], Method]) -> float:
    """Chi-square per degree of freedom of an image's first three codes, guided and filtered by top-k."""
    target = images.target("small")
    condition = images.condition("small", 1)
    sampling = replace(NARROW, max_new_tokens=4)
    wanted = [Request(f"draw-{i}", "", (), sampling, seed=1, condition=condition) for i in range(NUM_DRAWS)]
    done = checks.run(Engine(target, make(target), 100, 32), wanted)
    seen = Counter(completion.token_ids[:3] for completion in done.values())
    expected = _joint(torch.from_numpy(condition))
    assert set(seen) <= set(expected), "a code that the filter removes was drawn"
    used = {codes: p for codes, p in expected.items() if p * NUM_DRAWS >= 5}
    assert len(used) >= 15, "too few cells to tell anything"
    statistic = sum((seen.get(codes, 0) - p * NUM_DRAWS) ** 2 / (p * NUM_DRAWS) for codes, p in used.items())
    rare = (1.0 - sum(used.values())) * NUM_DRAWS
    if rare >= 5:
        statistic += (NUM_DRAWS - sum(seen.get(codes, 0) for codes in used) - rare) ** 2 / rare
    return statistic / (len(used) - 1)


def _joint(condition: Tensor) -> dict[tuple[int, ...], float]:
    """Probabilities of the first three codes, by the slow reference."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for codes, p in joint.items():
            asked: list[Tensor] = []

            def replay(position: int, logits: Tensor, codes: tuple[int, ...] = codes, out: list[Tensor] = asked) -> int:
                if position < len(codes):
                    return codes[position]
                out.append(logits)
                return 0

            images.reference("small").generate(condition, images.reference_sampling(NARROW), replay, length + 1)
            shares = asked[0].softmax(-1)
            longer |= {(*codes, code): p * float(shares[code]) for code in shares.nonzero()[:, 0].tolist()}
        joint = longer
    return joint
