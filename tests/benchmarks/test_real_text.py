"""The methods of the benchmark on real text are jobs, and its speeds are compared with other engines only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.engine_peer import choose_method
from benchmarks.real.heads import arguments_of
from benchmarks.real.peers import ON_TEXT
from benchmarks.real.text import DRAFTED, HEADS, head_settings, job_of, settings
from benchmarks.tables.parts import PARTS
from configs.load import load_job
from configs.training import TrainDrafterJobConfig


@pytest.mark.parametrize("name", sorted({name for name, _ in (*settings(), *head_settings())}))
def test_every_method_is_a_valid_job(name: str) -> None:
    job = job_of(name, "float32")
    assert job.method.verify_mode == "lossless"
    assert (job.model.drafter is not None) == (name in (*DRAFTED, *HEADS))


@pytest.mark.parametrize("name", list(HEADS))
def test_every_head_has_a_training_job_of_its_own_kind(name: str, tmp_path: Path) -> None:
    _, config, *overrides = arguments_of(name, tmp_path, 1)
    training = load_job(TrainDrafterJobConfig, config, tuple(overrides))
    assert training.head.kind == job_of(name, "bfloat16").method.drafter.kind
    assert training.output.path == str(tmp_path / name)
    assert training.workers.teacher_cache.path == str(tmp_path / "states")


def test_no_engine_has_a_drafter() -> None:
    others = {"transformers", "vLLM", "vLLM, n-grams"}
    own = {"draftfleet", "draftfleet, n-grams"}
    assert {contender.row for contender in ON_TEXT} == own | others
    assert choose_method("lookup", 5).drafter.kind == "lookup"
    assert choose_method("lookup", 5).tree.length == 5  # type: ignore[union-attr]


def row(batch: int, name: str, seconds: float | None) -> dict[str, Any]:
    speed = None if seconds is None else {"median": 8 / seconds, "low": 8 / seconds, "high": 8 / seconds}
    verdict = {"num_sequences": 8, "num_equal": 8, "num_close": 0, "num_different": 0}
    return {
        "batch": batch, "row": name, "variant": "", "seconds": [seconds or 1.0], "samples_per_s": speed,
        "tokens_per_s": speed, "acceptance_length": None, "peak_bytes": 2**30, "verdict": verdict,
    }  # fmt: skip


def test_speeds_are_those_over_the_fastest_other_engine() -> None:
    rows = [row(1, "draftfleet", 4.0), row(1, "draftfleet, n-grams", 2.0), row(1, "transformers", 8.0)]
    rows += [row(1, "vLLM", 5.0), row(1, "vLLM, n-grams", None)]
    results = {"peers": {"rows": rows}}
    assert PARTS["real_peers_line"].render(results).endswith("2.50 at batch 1 (draftfleet, n-grams over vLLM).")
    assert PARTS["real_peers"].render(results).count("\n") == 6
