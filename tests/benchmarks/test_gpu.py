"""The benchmark for GPUs, run on a CPU at tiny sizes: it needs neither Ray nor pydantic, reports what it could not
measure, and prints no speed for outputs that differ."""

from __future__ import annotations

import json
import math
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
from benchmarks.gpu.sizes import FULL, TINY
from benchmarks.harness.clock import DeviceClock, bytes_of_column, bytes_of_weights
from benchmarks.harness.engines import checked
from benchmarks.harness.verdict import spread
from benchmarks.inflate.model import Inflation
from benchmarks.tables.gpu import claims, gpu_findings
from benchmarks.tables.parts import PARTS, show
from decoding import Completion, Request, Sampling
from decoding.types import RequestError
from models.backends.cpu.backend import CpuBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.backends.cuda.tree_attention import TreeKernel
from models.kv.lanes import LaneModel, SlotBatch
from tests.models.plain_tree_kernel import plain as plain_tree_kernel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
ABSENT = ("ray", "pydantic", "pyarrow", "fsspec", "av", "decord", "ftfy", "bs4", "s3fs", "pandas")
"""What an interpreter with torch and transformers alone does not have."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
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


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    assert gpu.main(["--device", "cpu", "--tiny"]) == 2
    assert "2.11 or newer" in capsys.readouterr().err
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert gpu.refusal("cpu") == ""


def test_full_sizes_are_refused_on_a_cpu() -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.parse(["--device", "cpu"])
    assert ended.value.code == 2


def test_a_run_has_a_row_for_everything_and_all_outputs_are_the_targets(found: dict[str, Any]) -> None:
    assert found["failed"] == {}
    assert found["skipped"] == {}
    assert json.loads(json.dumps(found))["gamma"] == TINY.gamma
    rows = found["decoding"]["rows"] + found["fused"]["rows"]
    places = {(row["batch"], row["method"], row["step"]) for row in rows}
    steps = ("eager", "captured", "fused")
    assert places == {(b, m, s) for b in TINY.batches for m in ("plain", "chain") for s in steps}
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
    for row in found["generate"]["rows"]:
        assert row["verdict"]["num_equal"] == row["verdict"]["num_sequences"] > 0
        assert row["num_requests"] == row["batch"] * TINY.requests_per_slot
    assert {row["batch"] for row in found["generate"]["rows"]} == set(TINY.batches)
    assert {row["step"]: row["equal_images"] for row in found["images"]["rows"]} == {"captured": 2, "eager": 2}
    assert len(found["long"]["rows"]) == sum(len(batches) for _, batches in TINY.long) * (1 + 2 * len(TINY.rates))
    for row in found["long"]["rows"]:
        least = row["batch"] * row["steps"]
        assert row["synthetic_tokens"] == least if row["rate"] is None else row["synthetic_tokens"] > least


def test_the_tables_say_everything_that_was_found(found: dict[str, Any]) -> None:
    result = show("gpu", found, *gpu.TABLES)
    assert result.count("**") == 2 * len(("attention", "pair", "decoding", "prefill", "generate", "images", "long"))
    assert "has no tree kernel" in result
    assert f"| {TINY.batches[-1]} | chain | fused |" in result
    assert "transformers' compiled steps: no GPU" in result
    assert PARTS["gpu_headline"].render(found).count("\n") == 1 + len(TINY.batches)
    assert f"| {TINY.batches[-1]} | chain | captured |" in result


def test_the_tables_are_rendered_without_sections_that_have_no_figures(found: dict[str, Any]) -> None:
    some = {
        name: value for name, value in found.items() if name not in ("attention", "prefill", "generate", "decoding")
    }
    assert PARTS["gpu_headline"].render(some).count("\n") == 1 + len(TINY.batches)
    assert gpu_findings(found).startswith("- Captured steps")
    findings = gpu_findings(some)
    assert findings.startswith("- Five drafts over plain decoding")
    assert "tree kernel" not in findings
    assert "**Prefills" not in show("gpu", some, *gpu.TABLES)


def test_sections_of_earlier_runs_are_kept_unless_they_are_compared_with_new_ones() -> None:
    facts = {"cores": 1, "torch": "2", "transformers": "5", "dtype": "bfloat16", "gamma": 5}
    earlier = {**facts, "device": "A", "seconds": {"fused": 9.0}, "skipped": {}, "failed": {}}
    earlier |= {name: f"old {name}" for name in ("pair", "fused", "generate", "generate_compiled", "images")}
    found = {**facts, "device": "B", "seconds": {"pair": 1.0}, "skipped": {"long": "no time"}}
    found |= {"failed": {"fused": "it broke"}, "pair": "new pair", "generate": "new generate", "attention": "new"}
    kept = gpu.merge(earlier, found)
    assert [kept[name] for name in ("pair", "fused", "generate")] == ["old pair", "old fused", "old generate"]
    assert (kept["images"], kept["attention"]) == ("old images", "new")
    assert {name: run["device"] for name, run in kept["runs"].items()} == {
        "pair": "A", "fused": "A", "generate": "A", "generate_compiled": "A", "images": "A", "attention": "B",
    }  # fmt: skip
    assert (kept["skipped"], kept["failed"]) == ({"long": "no time"}, {})
    again = gpu.merge(kept, {**found, "failed": {}, "fused": "new fused"})
    assert [again[name] for name in ("pair", "fused", "generate")] == ["new pair", "new fused", "new generate"]
    assert "generate_compiled" not in again
    assert again["runs"]["images"]["device"] == "A"
    assert gpu.merge({}, found)["runs"].keys() == {"pair", "generate", "attention"}


def test_prompts_are_prefetched_where_kernels_are_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "is_asynchronous", True)
    prefetching = make_text_pair(TINY, CPU)
    assert all(one.prompt_thread is not None for one in prefetching.targets.values())
    found = gpu_decoding.measure_fused(prefetching, TINY, 1e10, lambda: True)
    assert len(found["rows"]) == 2 * len(TINY.batches)
    assert not [row["withheld"] for row in found["rows"] if row["withheld"]]


def test_steps_are_replayed_and_not_only_called_so(pair: TextPair) -> None:
    bench = gpu_decoding.Bench(pair, "chain, captured", 1, TINY.gamma)
    bench.run([], False)
    models = (pair.targets[CAPTURED], pair.drafters[CAPTURED])
    assert all(isinstance(model._run, CapturedDecoder) for model in models)
    assert all(model._run is None for model in (pair.targets["eager"], pair.drafters["eager"]))


def test_a_device_is_busy_in_replays_and_output_layers_only(pair: TextPair) -> None:
    bench = gpu_decoding.Bench(pair, "chain, captured", 2, TINY.gamma)
    asked = [Request(str(place), text, sampling=Sampling(max_new_tokens=6)) for place, text in enumerate(pair.prompts)]
    bench.run(asked, True)
    reading = bench.readings[0]
    for kind in ("target", "drafter"):
        assert 0 < reading[kind].busy_s < reading[kind].seconds
    assert reading["prompts"].busy_s == 0
    # What was read is gone.
    assert bench.clock.read()["target"].busy_s == 0
    eager = gpu_decoding.Bench(pair, "chain, eager", 2, TINY.gamma)
    eager.run(asked, True)
    assert eager.readings[0]["target"].busy_s == 0 < eager.readings[0]["target"].seconds


def test_a_row_whose_outputs_differ_has_no_speed(pair: TextPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: replayed steps give the states of the row beside."""
    called = CapturedDecoder.__call__

    def mixed_up(self: Any, *given: Any) -> Any:
        return called(self, *given).roll(1, 0)

    monkeypatch.setattr(CapturedDecoder, "__call__", mixed_up)
    rows = gpu_decoding.measure_decoding(pair, TINY, 1e9, lambda: True)["rows"]
    found = {(row["method"], row["step"]): row for row in rows if row["batch"] == 3}
    assert found["plain", "eager"]["tokens_per_s"] is not None
    assert found["plain", "captured"]["tokens_per_s"] is None
    assert "outputs differ" in found["plain", "captured"]["withheld"]


def test_an_inflated_model_that_is_not_its_source_ends_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_tensor = Inflation.fill

    def wrong(self: Any, name: str, out: torch.Tensor) -> None:
        fill_tensor(self, name, out)
        if name.endswith("layers.3.mlp.down_proj.weight"):
            out.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))

    monkeypatch.setattr(Inflation, "fill", wrong)
    monkeypatch.setattr(gpu, "measure_images", lambda *_: {"rows": [], "left_out": []})
    result = gpu.measure(TINY, CPU, 600.0)
    assert "is another model" in result["failed"]["pair"]
    assert result["skipped"] == dict.fromkeys(
        ("prefill", "decoding", "generate", "generate_compiled", "long", "fused"), "it needs pair"
    )
    assert "*decoding*: no figures, it needs pair." in show("gpu", result, *gpu.TABLES)


def test_an_exhausted_time_limit_is_reported() -> None:
    result = gpu.measure(TINY, CPU, 0.0)
    assert set(result["skipped"]) == set(gpu.BUDGETS_S)
    sections = gpu.Sections(600.0)
    sections.run("copy", lambda: 1.0)
    # What a section does not use is left to the one after it.
    assert sections._ends_s - sections._began_s == pytest.approx(gpu.BUDGETS_S["copy"], abs=1.0)
    sections.run("attention", lambda: [])
    both = gpu.BUDGETS_S["copy"] + gpu.BUDGETS_S["attention"]
    assert sections._ends_s - sections._began_s == pytest.approx(both, abs=1.0)
    assert sum(gpu.BUDGETS_S.values()) <= gpu.MAX_S < 600


def test_a_batch_for_which_no_time_is_left_is_named(pair: TextPair) -> None:
    answers = iter([True, False, False])
    found = gpu_decoding.measure_decoding(pair, TINY, 1e9, lambda: next(answers))
    rows, left_out = found["rows"], found["left_out"]
    assert {row["batch"] for row in rows} == {1}
    # The first round is always timed.
    assert all(len(row["seconds"]) == 1 for row in rows)
    assert left_out == ["batch 3: the section's time was used up"]


def shifted(*given: Any) -> Any:
    return plain_tree_kernel(*given) + 1.0


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_tree_kernel_has_no_time_where_it_differs(is_faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: TreeKernel = shifted if is_faulty else plain_tree_kernel
    monkeypatch.setattr(gpu_kernels, "kernel_for", lambda *_: kernel)
    for row in gpu_kernels.measure_attention(TINY, CPU):
        assert ("tree_kernel_us" in row) is not is_faulty
        assert ("withheld" in row) is is_faulty


def test_bytes_are_weights_once_and_a_column_for_each_token_held(pair: TextPair) -> None:
    target = pair.targets["eager"]
    lanes = LaneModel(target.decoder, target.head, 2, 1, 64)
    layers = 4 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256)
    assert bytes_of_weights(lanes) == 4 * (layers + 256 + 721 * 256)
    assert bytes_of_column(lanes) == 4 * 2 * 4 * 4 * 64
    clock = DeviceClock([lanes])
    slots = SlotBatch(torch.arange(2), (0, 1), (1, 1))
    with torch.inference_mode():
        lanes.admit(slots, [[target.encode(text, ())] for text in pair.prompts[:2]])
        held = sum(lanes._prefix_lengths)
        tokens = torch.full((2, 3), 5)
        visible = torch.ones(3, 3, dtype=torch.bool).tril().expand(2, -1, -1)
        lanes.logits(lanes.forward(slots, tokens, torch.arange(3).expand(2, -1), visible))
    reading = clock.read()
    assert (reading["prompts"].calls, reading["target"].calls, reading["drafter"].calls) == (1, 1, 0)
    assert reading["target"].num_bytes == bytes_of_weights(lanes) + (held + 2 + 6) * bytes_of_column(lanes)
    assert clock.read()["target"].calls == 0


def test_the_roofline_is_bytes_over_what_a_copy_moves() -> None:
    """A made-up row at the limit: reached, and one a little slower: not."""

    def claims_for(of_roofline: float, outside: float) -> str:
        row = {
            "batch": 1, "method": "plain", "step": "captured", "tokens_per_s": spread([100.0]),
            "of_roofline": of_roofline, "outside_graphs": outside,
        }  # fmt: skip
        return claims({"decoding": {"rows": [row]}})

    assert "roofline: reached" in claims_for(0.8, 0.03)
    assert "at most 3%: reached" in claims_for(0.8, 0.03)
    assert "roofline: not reached" in claims_for(0.79, 0.03)
    assert "at most 3%: not shown" in claims_for(0.8, 0.04)


def test_the_full_sizes_are_those_that_were_asked_for() -> None:
    assert FULL.batches == (1, 8, 32, 64)
    assert [columns for columns, _ in FULL.long] == [2_000, 25_000]
    assert FULL.target.num_parameters() == pytest.approx(6.5e9, rel=0.02)
    # Exact in half precision: widths grow by powers of four.
    assert math.log(FULL.target.hidden / 256, 4).is_integer()
    assert math.log(FULL.drafter.hidden / 64, 4).is_integer()
    ratio = FULL.drafter.num_parameters() / FULL.target.num_parameters()
    assert ratio == pytest.approx(0.05, rel=0.05)


def test_a_request_that_fails_is_no_figure() -> None:
    refused = Completion("a", finish_reason="error", error=RequestError("prompt_refused", "no"))
    with pytest.raises(RuntimeError, match="1 requests failed"):
        checked([refused])
