"""The benchmark for GPUs, run on a CPU at tiny sizes: it needs neither Ray nor pydantic, reports what it could not
measure, and prints no speed for outputs that differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import decoding as gpu_decoding
from benchmarks.gpu import kernels as gpu_kernels
from benchmarks.gpu.models import CAPTURED, TextPair, make_text_pair
from benchmarks.gpu.sizes import TINY
from benchmarks.harness.engines import checked
from benchmarks.tables.parts import PARTS, show
from decoding import Completion
from decoding.types import RequestError
from models.backends.cpu.backend import CpuBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.cuda.tree_attention import TreeKernel
from tests.models.plain_tree_kernel import plain as plain_tree_kernel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
ABSENT = ("ray", "pydantic", "pyarrow", "fsspec", "av", "decord", "ftfy", "bs4", "s3fs", "pandas")
"""What an interpreter with torch and transformers alone does not have."""


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    """One whole run, without the kernel."""
    return gpu.measure(TINY, CPU, 600.0)


@pytest.fixture(scope="module")
def pair() -> TextPair:
    return make_text_pair(TINY, CPU)


def test_a_whole_run_needs_neither_ray_nor_pydantic() -> None:
    """In a process that cannot import them, nor anything else that torch and transformers do without."""
    code = (
        f"import sys\nfor name in {ABSENT!r}: sys.modules[name] = None\n"
        "from benchmarks.gpu import __main__ as gpu\n"
        "code = gpu.main(['--device', 'cpu', '--tiny'])\n"
        "rooms = {name.split('.')[0] for name in sys.modules}\n"
        "assert not rooms & {'configs', 'actors', 'pipeline', 'jobs'}, rooms\n"
        "sys.exit(code)"
    )
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks" / "results").iterdir()}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "**Decoding, 0.003" in done.stdout
    assert "Synthetic: long visual contexts" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "benchmarks" / "results").iterdir()} == before


def test_without_a_gpu_it_refuses_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: no GPU was found")
    assert output.err.count("\n") == 1


def test_a_run_has_a_row_for_everything_and_all_outputs_are_the_targets(figures: dict[str, Any]) -> None:
    assert figures["failed"] == {}
    assert figures["skipped"] == {}
    assert json.loads(json.dumps(figures))["gamma"] == TINY.gamma
    rows = figures["decoding"]["rows"] + figures["fused"]["rows"]
    keys = {(row["batch"], row["method"], row["step"]) for row in rows}
    steps = ("eager", "captured", "fused")
    assert keys == {(b, m, s) for b in TINY.batches for m in ("plain", "chain") for s in steps}
    for row in rows:
        assert row["withheld"] == ""
        assert row["verdict"]["num_equal"] == row["verdict"]["num_sequences"] > 0
        assert 0 < row["of_roofline"] < 1
        outside = row["outside_graphs"]
        assert outside is None if row["step"] == "eager" else 0 < outside < 1
        drafts = row["forwards"]["drafter"]["calls"]
        assert all(drafts) if row["method"] == "chain" else not any(drafts)
        # Every step verifies once.
        assert row["forwards"]["target"]["calls"] == row["num_steps"]
    for row in figures["generate"]["rows"]:
        assert row["verdict"]["num_equal"] == row["verdict"]["num_sequences"] > 0
        assert row["num_requests"] == row["batch"] * TINY.requests_per_slot
    assert {row["batch"] for row in figures["generate"]["rows"]} == set(TINY.batches)
    assert {row["step"]: row["equal_images"] for row in figures["images"]["rows"]} == {"captured": 2, "eager": 2}
    assert len(figures["long"]["rows"]) == sum(len(batches) for _, batches in TINY.long) * (1 + 2 * len(TINY.rates))
    for row in figures["long"]["rows"]:
        least = row["batch"] * row["steps"]
        assert row["synthetic_tokens"] == least if row["rate"] is None else row["synthetic_tokens"] > least


def test_the_tables_contain_every_result_of_a_run(figures: dict[str, Any]) -> None:
    result = show("gpu", figures, *gpu.TABLES)
    assert result.count("**") == 2 * len(("attention", "pair", "decoding", "prefill", "generate", "images", "long"))
    assert "has no tree kernel" in result
    assert f"| {TINY.batches[-1]} | chain | fused |" in result
    assert "transformers' compiled steps: no GPU" in result
    assert PARTS["gpu_headline"].render(figures).count("\n") == 1 + len(TINY.batches)
    assert f"| {TINY.batches[-1]} | chain | captured |" in result


def test_prompts_are_prefetched_where_kernels_are_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "is_asynchronous", True)
    prefetching = make_text_pair(TINY, CPU)
    assert all(target.prompt_thread is not None for target in prefetching.targets.values())
    rows = gpu_decoding.measure_fused(prefetching, TINY, 1e10, lambda: True)
    assert len(rows["rows"]) == 2 * len(TINY.batches)
    assert not [row["withheld"] for row in rows["rows"] if row["withheld"]]


def test_captured_models_have_captured_decoders_and_eager_models_none(pair: TextPair) -> None:
    bench = gpu_decoding.Bench(pair, "chain, captured", 1, TINY.gamma)
    bench.run([], False)
    models = (pair.targets[CAPTURED], pair.drafters[CAPTURED])
    assert all(isinstance(model._run, CapturedDecoder) for model in models)
    assert all(model._run is None for model in (pair.targets["eager"], pair.drafters["eager"]))


def test_a_row_whose_outputs_differ_has_no_speed(pair: TextPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: replayed steps give the states of the row beside."""
    called = CapturedDecoder.__call__

    def mixed_up(self: Any, *given: Any) -> Any:
        return called(self, *given).roll(1, 0)

    monkeypatch.setattr(CapturedDecoder, "__call__", mixed_up)
    rows = gpu_decoding.measure_decoding(pair, TINY, 1e9, lambda: True)["rows"]
    rows_by_method = {(row["method"], row["step"]): row for row in rows if row["batch"] == 3}
    assert rows_by_method["plain", "eager"]["tokens_per_s"] is not None
    assert rows_by_method["plain", "captured"]["tokens_per_s"] is None
    assert "outputs differ" in rows_by_method["plain", "captured"]["withheld"]


def shifted(*given: Any) -> Any:
    return plain_tree_kernel(*given) + 1.0


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_tree_kernel_has_no_time_where_it_differs(is_faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: TreeKernel = shifted if is_faulty else plain_tree_kernel
    monkeypatch.setattr(gpu_kernels, "kernel_for", lambda *_: kernel)
    for row in gpu_kernels.measure_attention(TINY, CPU):
        assert ("tree_kernel_us" in row) is not is_faulty
        assert ("withheld" in row) is is_faulty


def test_a_request_that_fails_is_no_figure() -> None:
    refused = Completion("a", finish_reason="error", error=RequestError("prompt_refused", "no"))
    with pytest.raises(RuntimeError, match="1 requests failed"):
        checked([refused])
