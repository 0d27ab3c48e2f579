"""The methods of the benchmark on real text are jobs, and its speeds are compared with other engines only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.results import read_results, write_results
from benchmarks.peers.engine_peer import choose_method
from benchmarks.real import __main__ as command
from benchmarks.real import text
from benchmarks.real.heads import arguments_of
from benchmarks.real.peers import CELLS, ON_TEXT
from benchmarks.real.text import DRAFTED, HEADS, head_settings, job_of, settings
from benchmarks.tables.parts import PARTS
from configs.load import load_job
from configs.training import TrainDrafterJob


@pytest.mark.parametrize("name", sorted({name for name, _ in (*settings(), *head_settings())}))
def test_every_method_is_a_valid_job(name: str) -> None:
    job = job_of(name, "float32")
    assert job.method.verify_mode == "lossless"
    assert (job.model.drafter is not None) == (name in (*DRAFTED, *HEADS))


@pytest.mark.parametrize("name", list(HEADS))
def test_every_head_has_a_training_job_of_its_own_kind(name: str, tmp_path: Path) -> None:
    _, config, *overrides = arguments_of(name, tmp_path, 1)
    training = load_job(TrainDrafterJob, config, tuple(overrides))
    assert training.head.kind == job_of(name, "bfloat16").method.drafter.kind
    assert training.output.path == str(tmp_path / name)
    assert training.workers.teacher_cache.path == str(tmp_path / "states")


def test_no_engine_has_a_drafter() -> None:
    others = {"transformers", "vLLM", "vLLM, n-grams"}
    own = {"draftfleet", "draftfleet, n-grams"}
    assert {one.row for one in ON_TEXT} == own | others
    assert choose_method("lookup", 5).drafter.kind == "lookup"
    assert choose_method("lookup", 5).tree.length == 5  # type: ignore[union-attr]


def test_results_of_other_checkpoints_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {"sd_chain": "new", "plain": ""}
    kept = {"method": "plain", "temperature": 0.0, "drafter_sha256": "", "is_kept": True}
    old = {"method": "sd_chain", "temperature": 0.0, "drafter_sha256": "old", "is_kept": True}
    other = {"method": "medusa", "temperature": 0.0, "drafter_sha256": "x", "is_kept": True}
    write_results(tmp_path / "equality-3.json", {"equality": [kept, old, other]})
    monkeypatch.setattr(command, "drafter_sha256", hashes.__getitem__)
    measured: list[tuple[str, float]] = []

    def measure(missing: list[tuple[str, float]], *_: Any) -> Any:
        for name, temperature in missing:
            measured.append((name, temperature))
            yield {"method": name, "temperature": temperature, "drafter_sha256": hashes[name], "is_kept": False}

    monkeypatch.setattr(command, "measure_equality", measure)
    wanted = [("plain", 0.0), ("sd_chain", 0.0), ("sd_chain", 1.0)]
    found = command.run_equality(wanted, 3, tmp_path)
    assert measured == [("sd_chain", 0.0), ("sd_chain", 1.0)]
    assert [row["is_kept"] for row in found] == [True, False, False]
    assert command.run_equality(wanted, 3, tmp_path) == found
    assert len(measured) == 2
    names = [row["method"] for row in read_results(tmp_path / "equality-3.json")["equality"]]
    assert sorted(names) == ["medusa", "plain", "sd_chain", "sd_chain"]


def test_a_checkpoint_is_known_by_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(text.DRAFTED, "sd_chain", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = text.drafter_sha256("sd_chain")
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert first != text.drafter_sha256("sd_chain")
    assert text.drafter_sha256("plain") == ""


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


def test_every_batch_is_filled_twice() -> None:
    assert all(cell.num_requests >= 2 * cell.batch for cell in CELLS)
