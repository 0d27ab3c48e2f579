"""`pool.slots: auto`: the number of slots that fit into free memory, and its reason."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import metrics
from actors.generate import Generate
from actors.loading import pair, slot_count
from actors.loading.method import build_method
from actors.loading.slot_count import LOGIT_COPIES, count_slots, position_bytes, slot_bytes, usable_bytes
from actors.results import Stamp
from configs.load import ConfigError, load_job, load_preset
from configs.method import MethodConfig
from configs.pool import EnginePoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.contracts import Drafter
from models.backends.pages import PAGE_POSITIONS, num_pages_of
from pipeline.rows.schemas import result_schema
from pipeline.run.plan_text import engines
from tests import toys
from tests.actors.fakes import FakePair, fake_job
from tests.conformance import checks

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
MANY = {"max_batches_in_flight": 64, "batch_rows": 1000}


def method(**sections: Any) -> MethodConfig:
    return MethodConfig.model_validate_json(json.dumps(sections))


PLAIN = method()
CHAIN = method(drafter={"kind": "model"}, tree={"kind": "chain", "length": 4})
SKIP = method(drafter={"kind": "layer_skip", "layers": 1}, tree={"kind": "dynamic", "top_k": 8, "total_tokens": 5})
LANES = method(drafter={"kind": "model"}, contexts=[{"kind": "full"}, {"kind": "text_only"}])


def count(free: int, *methods: MethodConfig, context: int = 160, **pool: Any) -> tuple[int, str]:
    """Count slots with `free` bytes on the device of the toys."""
    drafter = toys.target("llama") if any(method.needs_checkpoint for method in methods) else None
    settings = EnginePoolConfig(slots="auto", **(MANY | pool))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_count, "usable_bytes", lambda *_: free)
        result = count_slots(settings, methods, toys.target("llama"), drafter, context)
        assert result.pages_per_slot is None
        return result.slots, result.reason


def sizes(config: MethodConfig, context: int = 160) -> int:
    target = toys.target("llama")
    column = position_bytes(target.decoder, target.hidden_size)
    return slot_bytes(config, target, column, column, context)[CPU]


@pytest.mark.parametrize("config", [PLAIN, CHAIN, LANES, SKIP], ids=["plain", "chain", "lanes", "skip"])
def test_the_slot_count_is_the_largest_that_fits_into_memory(config: MethodConfig) -> None:
    each = sizes(config)
    assert [count(free, config)[0] for free in (5 * each - 1, 5 * each, 6 * each - 1)] == [4, 5, 5]


@pytest.mark.parametrize("free", [0, 1])
def test_the_slot_count_is_at_least_one(free: int) -> None:
    assert count(free, PLAIN)[0] == 1


def test_the_slot_count_is_bounded_by_useful_slots_and_rows_in_flight() -> None:
    plenty = 10**15
    slots, reason = count(plenty, PLAIN)
    assert slots == 32
    assert reason.startswith(
        "the most that are worth it on this device (not 64,000 by the rows of 64 batches in flight"
    )
    slots, reason = count(plenty, PLAIN, max_batches_in_flight=2, batch_rows=3)
    assert slots == 6
    assert reason.startswith("the rows of 2 batches in flight (not 32 by ")


@pytest.mark.parametrize("config", [PLAIN, CHAIN, LANES, SKIP], ids=["plain", "chain", "lanes", "skip"])
def test_the_estimated_memory_of_a_slot_is_at_least_what_engines_allocate(config: MethodConfig) -> None:
    target, drafter = toys.target("llama"), toys.perturbed("llama", 0.02)
    built = build_method(config, drafter if config.needs_checkpoint else None, target)
    engine = checks.Engine(target, built, 8, 160)
    checks.run(engine, checks.requests("llama", 2))
    caches = [engine._lanes.cache]
    if config.needs_checkpoint:
        inner: Drafter = built.drafter
        caches.append(inner.lanes.cache)  # type: ignore[attr-defined]
    held = sum(
        memory.numel() * memory.element_size()
        for cache in caches
        for memory in (*cache.keys, *cache.values)
        if memory is not None
    )
    num_nodes = 1 if config is PLAIN else built.tree.max_nodes
    logits = LOGIT_COPIES * num_nodes * toys.VOCAB_SIZE * 4
    # A drafter's scratch is sized for the widest catch-up, which has 125 positions more than this one.
    assert held / 8 + logits <= sizes(config)
    spare = (
        0
        if not config.needs_checkpoint
        else 140 * len(config.contexts) * sum(position_bytes(drafter.decoder, drafter.hidden_size).values())
    )
    assert sizes(config) <= held / 8 + logits + spare


def test_the_method_with_the_largest_slots_determines_the_slot_count() -> None:
    auto = method(auto={"candidates": [json.loads(CHAIN.model_dump_json())]})
    free = 5 * sizes(CHAIN)
    assert [method.label for method in auto.methods] == ["plain", "model+chain+exact"]
    assert [count(free, *methods)[0] for methods in (auto.methods, auto.methods[::-1])] == [5, 5]
    assert count(free, PLAIN)[0] > 5


def test_a_machines_memory_is_shared_by_its_actors_and_half_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.backends.base.free_bytes", lambda: 1200)
    assert usable_bytes(EnginePoolConfig(), CPU) == 600
    assert usable_bytes(EnginePoolConfig(max_size=3), CPU) == 200


def test_a_share_of_a_gpu_gets_its_share_of_memory_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)

    def set_memory(used: int) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (900, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: used)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: used)

    set_memory(100)
    assert usable_bytes(EnginePoolConfig(num_gpus=1.0), gpu) == 765
    assert usable_bytes(EnginePoolConfig(num_gpus=0.5), gpu) == 340
    set_memory(800)
    assert usable_bytes(EnginePoolConfig(num_gpus=0.5), gpu) == 0


def test_the_slot_count_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        count(5 * sizes(CHAIN), CHAIN)
    (record,) = caplog.records
    assert record.getMessage().startswith("pool.slots is auto: 5 slots: 0.00 GiB of cpu for ")
    assert "not 32 by the most that are worth it on this device" in record.getMessage()


def test_an_actor_counts_slots_once_and_reports_them_to_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(FakePair):
        asked: list[int] = []  # noqa: RUF012

        def count_slots(self) -> tuple[int, str]:
            self.asked.append(1)
            return 7, "told"

    results: list[int] = []
    monkeypatch.setattr("actors.engine_actor.engine_metrics", lambda stamp, method, slots: results.append(slots))
    fake = Counting()
    job = fake_job(pool={"slots": "auto", "batch_rows": 8})
    Generate(job, result_schema(()), Stamp("j", 1, "f"), load=lambda *_: fake)
    assert Counting.asked == [1]
    assert results == [7]
    assert [engine.slots for engine in fake.engines] == [7]


def test_a_loaded_pair_counts_its_own_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.save("llama", tmp_path / "target")
    checkpoint = {"path": str(tmp_path / "target"), "dtype": "float32", "device": "cpu"}
    job = CaptionJobConfig.model_validate_json(
        json.dumps(
            {
                "source": {"kind": "images", "path": "in"},
                "prompt": "Describe.",
                "model": {"target": checkpoint, "drafter": checkpoint},
                "method": json.loads(CHAIN.model_dump_json()),
                "pool": {"slots": "auto", "max_context_tokens": 160, **MANY},
                "sink": {"path": "out"},
            }
        )
    )
    monkeypatch.setattr("models.backends.base.free_bytes", lambda: 2 * 7 * sizes(CHAIN))
    loaded = pair.load(job)
    slots, reason = loaded.count_slots()
    assert slots == 7
    assert "of cpu for" in reason
    assert loaded.engine(slots).num_free_slots == 7


def test_the_plan_shows_that_memory_decides() -> None:
    assert engines(EnginePoolConfig(slots="auto")).startswith("1 × as many slots as memory holds on CPU, ")
    assert engines(EnginePoolConfig(slots=3)).startswith("1 × 3 slots on CPU, ")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0", "pool.slots: Input should be greater than or equal to 1"),
        ("4097", "pool.slots: Input should be less than or equal to 4096"),
        ("many", "pool.slots: Input should be a valid integer, or auto"),
        ("2.0", "pool.slots: Input should be a valid integer, or auto"),
        ("true", "pool.slots: Input should be a valid integer, or auto"),
        ("null", "pool.slots: Input should be a valid integer, or auto"),
    ],
)
def test_other_slots_than_numbers_and_auto_are_refused(value: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(CaptionJobConfig, ROOT / "configs/jobs/demo_caption.yaml", (f"pool.slots={value}",))
    assert reason in str(caught.value)


def test_slots_auto_does_not_change_the_fingerprint_of_a_job() -> None:
    for kind, name in ((CaptionJobConfig, "demo_caption"), (SynthesizeJobConfig, "zoo_images_plain")):
        jobs = [load_preset(kind, name, (f"pool.slots={value}",)) for value in ("auto", "3")]
        assert jobs[0].pool.slots == "auto"
        assert jobs[0].resolved()["pool"]["slots"] == "auto"
        assert jobs[0].fingerprint({}) == jobs[1].fingerprint({})


def test_the_slot_gauge_gets_a_number() -> None:
    assert metrics.METRICS["draftfleet_slots"].kind == "gauge"


def test_samples_of_different_lengths_share_pages_where_rows_are_read_by_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots and pages together use no more memory than there is, and a slot adds at least a quarter of a context."""
    monkeypatch.setattr(slot_count, "reads_rows", lambda *_: True)
    target = toys.target("llama")
    column = position_bytes(target.decoder, target.hidden_size)[CPU]
    context = slot_count.num_positions([CHAIN], target, 2000) * column
    each = slot_bytes(CHAIN, target, {CPU: column}, {CPU: column}, 2000)[CPU]
    for free in (5 * each, 9 * each, 10**12):
        monkeypatch.setattr(slot_count, "usable_bytes", lambda *_, free=free: free)
        result = count_slots(EnginePoolConfig(slots="auto", **MANY), [CHAIN], target, target, 2000)
        assert result.pages_per_slot is not None
        num_pages = int(result.slots * result.pages_per_slot)
        assert result.slots * (each - context) + num_pages * PAGE_POSITIONS * column <= free
        assert num_pages >= result.slots * context // (4 * PAGE_POSITIONS * column)
        assert num_pages <= result.slots * num_pages_of(context // column)
        assert result.slots > free // each or result.slots == 32
        assert f"{num_pages:,} pages of 64 KV positions" in result.reason


def test_images_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_count, "reads_rows", lambda *_: True)
    monkeypatch.setattr(slot_count, "usable_bytes", lambda *_: 10**9)
    target = toys.target("llama")
    monkeypatch.setattr(target, "max_new_tokens", 64)
    assert count_slots(EnginePoolConfig(slots="auto", **MANY), [PLAIN], target, None, 160).pages_per_slot is None
