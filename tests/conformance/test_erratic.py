"""No depth, off included, changes a token: every drafter and tree with an arbitrary controller."""

from __future__ import annotations

import pytest

from decoding import Engine
from decoding.acceptance import Exact
from tests import toys
from tests.conformance import checks, images, methods
from tests.conformance.erratic import Erratic, unsettled
from tests.covering import tiers
from tests.toys import images as image_toys

pytestmark = pytest.mark.slow

EXACT = [
    name
    for name, (make, families) in methods.METHODS.items()
    if isinstance(make(families[0]).acceptance, Exact) and name != "plain"
]


def controller_of(engine: Engine) -> Erratic:
    assert isinstance(engine.method.controller, Erratic)
    return engine.method.controller


def check_method(name: str, mode: str, seed: int) -> Engine:
    """Tokens are the oracle's, and every counter adds up."""
    make, families = methods.METHODS[name]
    family = "llava" if "llava" in families else families[0]
    target = toys.target(family)
    engine = Engine(target, unsettled(make(family), seed), 3, 160)
    wanted = checks.requests(family, 9, methods.MODES[mode], longest=24)
    done = checks.run(engine, wanted)
    oracle = checks.generated if mode == "greedy" else checks.referenced
    for request in wanted:
        completion = done[request.sample_id]
        assert completion.token_ids == oracle(family, request, target.eos_ids), (name, request.sample_id)
        checks.check_telemetry(completion)
    outcomes = controller_of(engine).outcomes
    drafted = [bool(outcome.levels) for outcome in outcomes]
    assert drafted.count(False) >= 2, "the drafter was off in fewer than two steps"
    assert drafted.count(True) >= 2, "the drafter was on in fewer than two steps"
    assert all(
        accepted <= most for result in outcomes for accepted, most in zip(result.accepted, result.offered, strict=True)
    )
    return engine


@tiers("name, mode", EXACT, list(methods.MODES), strength=1)
def test_no_depth_at_any_step_changes_a_token(name: str, mode: str) -> None:
    engine = check_method(name, mode, seed=len(name))
    assert engine.stats.num_generated_tokens > 40


@pytest.mark.parametrize("name", ["eagle2", "sd-tree", "medusa"])
def test_no_depth_changes_a_code_of_a_guided_image(name: str) -> None:
    target = image_toys.target("text", guided=True)
    method = unsettled(images.METHODS[name](target, "text"), 5)
    engine = Engine(target, method, 3, 64)
    wanted = image_toys.requests("text", 4, images.MODES["sampled-guided"])
    done = checks.run(engine, wanted)
    reference = images.expected("text", wanted, "sampled-guided")
    for request in wanted:
        assert done[request.sample_id].token_ids == reference[request.sample_id], request.sample_id
        checks.check_telemetry(done[request.sample_id])
