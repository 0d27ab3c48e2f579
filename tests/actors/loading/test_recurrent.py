"""Models with recurrent layers in pairs: methods are checked from configurations, and slots count the states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.loading import pair, slot_count
from actors.loading.method import build_method
from actors.loading.recurrent import is_chain
from actors.loading.slot_count import count_slots, position_bytes, slot_bytes
from actors.loading.state_bytes import slot_state_bytes
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.pool import EnginePoolConfig
from configs.schema import CaptionJobConfig
from decoding import Engine
from models.backends.layers import are_alike
from tests import toys
from tests.conformance import checks
from tests.conformance.recurrent import FAMILIES, KINDS

CPU = torch.device("cpu")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a text model with recurrent layers, and of one without."""
    made = {family: tmp_path_factory.mktemp(family) for family in ("lfm2", "llama")}
    for family, folder in made.items():
        toys.save(family, folder)
    return made


def method(**sections: Any) -> MethodConfig:
    return MethodConfig.model_validate_json(json.dumps(sections))


def job(target: Path, drafter: Path | None, sections: dict[str, Any]) -> CaptionJobConfig:
    weights = {"dtype": "float32", "device": "cpu"}
    model = {"target": {"path": str(target), **weights}}
    if drafter is not None:
        model["drafter"] = {"path": str(drafter), **weights}
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": "Describe it.",
        "model": model,
        "method": sections,
        "sink": {"path": "out"},
    }
    return CaptionJobConfig.model_validate_json(json.dumps(data))


STATIC = {"kind": "static", "branching": [2, 1]}
REFUSED = [
    ("lfm2", {"drafter": {"kind": "lookup"}, "tree": STATIC}, "method.tree: model.target has layers of type conv"),
    ("lfm2", {"drafter": {"kind": "lookup"}, "tree": {"kind": "sage"}}, "'sage' has several; take the tree 'chain'"),
    ("lfm2", {"drafter": {"kind": "model"}, "tree": {"kind": "dynamic"}}, "method.tree: model.target has layers"),
    ("llama", {"drafter": {"kind": "model"}, "tree": STATIC}, "method.tree: model.drafter has layers of type conv"),
    ("lfm2", {"drafter": {"kind": "layer_skip", "layers": 1}}, "take another drafter than 'layer_skip'"),
    (
        "lfm2",
        {"auto": {"candidates": [{"drafter": {"kind": "lookup"}}, {"drafter": {"kind": "lookup"}, "tree": STATIC}]}},
        "method.auto.candidates.1.tree: model.target",
    ),
]


@pytest.mark.parametrize(("target", "section", "reason"), REFUSED)
def test_methods_that_do_not_suit_recurrent_layers_are_refused_before_weights_are_read(
    target: str, section: dict[str, Any], reason: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.target.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=reason):
        pair.check(job(folders[target], folders["lfm2"], section))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"tree": STATIC},  # without drafts there is no tree
        {"drafter": {"kind": "lookup"}},
        {"drafter": {"kind": "model"}, "tree": {"kind": "static", "branching": [1, 1, 1]}},
        {"drafter": {"kind": "suffix"}},
    ],
)
def test_chains_are_taken(section: dict[str, Any], folders: dict[str, Path]) -> None:
    pair.check(job(folders["lfm2"], folders["lfm2"], section))


def test_trees_without_branches_are_chains() -> None:
    shapes = {"branching": [1, 1]}, {"paths": [[0], [0, 0]]}, {"branching": [1, 2]}, {"name": "mc_sim_7b_63"}
    trees = [method(drafter={"kind": "lookup"}, tree={"kind": "static", **shape}) for shape in shapes]
    assert [is_chain(tree) for tree in trees] == [True, True, False, False]


CHAIN = method(drafter={"kind": "model"}, tree={"kind": "chain", "length": 4})


@pytest.mark.parametrize("config", [method(), CHAIN], ids=["plain", "chain"])
@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in KINDS else slow) for name in FAMILIES])
def test_the_states_of_a_slot_take_at_least_what_engines_allocate(family: str, config: MethodConfig) -> None:
    target, drafter = toys.target(family), toys.perturbed(family, 0.02)
    built = build_method(config, drafter if config.needs_checkpoint else None, target)
    engine = Engine(target, built, 8, 160)
    checks.run(engine, checks.requests(family, 2))
    caches = [engine._lanes.cache]
    if config.needs_checkpoint:
        caches.append(built.drafter.lanes.cache)  # type: ignore[attr-defined]
    held = 0
    for cache in caches:
        assert cache.states is not None
        held += cache.states.num_bytes()[CPU]
    counted = slot_state_bytes(config, target, drafter)[CPU]
    assert held / 8 <= counted
    if not config.needs_checkpoint:
        assert held / 8 == counted


def test_the_slot_count_includes_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("bamba")
    position = position_bytes(target.decoder, target.hidden_size)
    each = slot_bytes(CHAIN, target, position, position, 160)[CPU] + slot_state_bytes(CHAIN, target, target)[CPU]
    settings = EnginePoolConfig(slots="auto", max_batches_in_flight=64, batch_rows=1000)
    counts = []
    for free in (5 * each - 1, 5 * each):
        monkeypatch.setattr(slot_count, "usable_bytes", lambda *_, free=free: free)
        counts.append(count_slots(settings, [CHAIN], target, target, 160).slots)
    assert counts == [4, 5]


def test_models_without_recurrent_layers_have_no_states() -> None:
    target = toys.target("llama")
    assert slot_state_bytes(CHAIN, target, target) == {}


def test_equal_layers_with_states_are_not_compiled_as_one() -> None:
    # Each layer of Falcon-H1 has attention and a state.
    target = toys.target("falcon_h1")
    assert not are_alike(list(target.decoder.layers))  # type: ignore[arg-type]
    assert not target.compile()
    assert are_alike(list(toys.target("llama").decoder.layers))  # type: ignore[arg-type]
