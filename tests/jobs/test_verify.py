"""`jobs.verify` on whole jobs of the shipped text pair."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import caption, verify
from models.inputs.processing import FrontEnd
from zoo.text import held_out_questions
from zoo.world import listing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 24


def command(folder: Path, out: Path, *overrides: str) -> list[str]:
    """Return the arguments of a job that captions `folder`/src into `out`."""
    config = folder / "job.yaml"
    config.write_text(
        f"source: {{kind: text, path: {folder}/src}}\n"
        'prompt: "{text}"\n'
        f"model:\n  target: {{path: {ROOT}/zoo/checkpoints/text_target, dtype: float32}}\n"
        f"  drafter: {{path: {ROOT}/zoo/checkpoints/text_drafter, dtype: float32}}\n"
        "method: sd_chain_text\n"
        "sampling: {max_new_tokens: 20}\n"
        "pool: {slots: 8, max_context_tokens: 256}\n"
        f"sink: {{path: {out}, keep_tokens: true, rows_per_file: 8}}\n"
        "job: {progress: false}\n"
    )
    return ["--config", str(config), *overrides]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "src").mkdir()
    prompts = [listing.write_prompt(*asked) for asked in held_out_questions(NUM_ROWS, 5)]
    (folder / "src/a.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    return folder


@pytest.fixture(scope="module")
def clean(folder: Path, local_ray: None) -> Path:
    assert caption.main(command(folder, folder / "out")) == 0
    return folder / "out"


@pytest.fixture
def copy(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "out"))


def change(out: Path, column: str, edit: Callable[[Any], Any], row: int = 0) -> str:
    """Change a value of one row of the first result file; return the id of the row."""
    path = sorted((out / "data").glob("*.parquet"))[0]
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[row] = edit(values[row])
    index = table.schema.get_field_index(column)
    changed = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    sink = io.BytesIO()
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), sink)
    path.write_bytes(sink.getvalue())
    return str(table["sample_id"][row].as_py())


def newest_record(out: Path) -> dict[str, Any]:
    newest = max(out.glob("_job/verify/*/verification.json"), key=lambda path: path.stat().st_mtime_ns)
    return dict(json.loads(newest.read_text()))


def differences(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("_job/verify/*/*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_one_wrong_position_is_found_and_equal_rows_raise_no_alarm(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = change(copy, "token_ids", lambda tokens: [*tokens[:9], tokens[9] + 1, *tokens[10:]], row=3)
    assert verify.main([str(copy), "--share", "1"]) == verify.DIFFERENT
    [difference] = differences(copy)
    assert (difference["sample_id"], difference["outcome"], difference["position"]) == (wrong, "different", 9)
    assert difference["recorded_token"] == difference["decoded_token"] + 1
    assert difference["margin"] > 10 * difference["tolerance"] > 0
    out = capsys.readouterr().out
    assert "rows         23 equal, 0 different within the tie tolerance, 1 different, 0 not compared" in out
    record = newest_record(copy)
    assert (record["num_equal"], record["num_different"], record["method"]) == (23, 1, "plain")


def test_a_job_that_is_clean_passes_by_share_and_seed(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(clean), "--share", "0.5", "--seed", "2"]) == verify.EQUAL
    out = capsys.readouterr().out
    number = int(out.split("bound        with ")[1].split(" rows")[0])
    assert 4 < number < 20
    assert f"none different, at most {100 * (1 - 0.05 ** (1 / number)):.3g} % of rows differ" in out


def test_a_job_is_compared_with_another_configuration(copy: Path, tmp_path: Path, folder: Path) -> None:
    arguments = command(folder, tmp_path / "unused", "--dry-run")
    assert verify.main([str(copy), "--share", "0.4", "--against", arguments[1]]) == verify.EQUAL
    # A second configuration that samples gives other rows.
    assert (
        verify.main([str(copy), "--share", "0.4", "--against", arguments[1], "sampling.temperature=5.0"])
        == verify.DIFFERENT
    )


def test_a_job_with_a_lossy_method_has_a_retention(
    folder: Path, tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    lossy = ("method.acceptance={kind: random, probability: 0.9}", f"sink.path={out}")
    assert caption.main(command(folder, out, *lossy)) == 0
    capsys.readouterr()
    assert verify.main([str(out), "--share", "1", "--metric", "edit"]) == verify.EQUAL
    shown = capsys.readouterr().out
    retention = float(shown.split("retention    ")[1].split("%")[0])
    assert retention < 99.9
    assert "is lossy: its rows may differ" in shown
    assert verify.main([str(out), "--share", "1", "--metric", "edit", "--max-loss", "0.01"]) == verify.DIFFERENT
    losses = [difference["loss"] for difference in differences(out)]
    assert 100 * (1 - sum(losses) / NUM_ROWS) == pytest.approx(retention, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--metric", "no_module:loss"], "--metric: no_module:loss: 'no_module' cannot be imported"),
        (["--share", "1e-9"], "--share 1e-09: none of the 24 published rows is chosen"),
        (["--max-loss", "0.1", "--share", "1"], "--max-loss: the output and the second decoding are lossless"),
        (["--against", "none.yaml"], "none.yaml: cannot be read"),
        (["pool.slot=3"], "pool.slot: is not a known key"),
        (["model.target.path=" + str(ROOT / "zoo/checkpoints/caption_target"), "--share", "1"], "model.target: "),
        (["pool.num_gpus=1", "--share", "1"], "pool.num_gpus: 1 GPU for each actor, and this Ray has no GPU"),
    ],
)
def test_outputs_that_cannot_be_verified_are_refused_before_ray_starts(
    clean: Path, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "verify", lambda *_: pytest.fail("the rows are decoded"))
    assert verify.main([str(clean), *arguments]) == verify.REFUSED
    assert reason in capsys.readouterr().err


def test_an_output_whose_prompts_had_other_special_tokens_is_refused(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrontEnd, "special_tokens_changed", True)
    assert verify.main([str(copy), "--share", "1"]) == verify.REFUSED
    assert "text_target reads other tokens than when the output was decoded" in capsys.readouterr().err


def test_a_source_that_has_changed_is_refused(copy: Path, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    source = folder / "src/a.txt"
    text, times = source.read_text(), source.stat()
    try:
        source.write_text(f"{text}one more line\n")
        assert verify.main([str(copy), "--share", "1"]) == verify.REFUSED
    finally:
        source.write_text(text)
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "source.path: a.txt: other (size, etag or time)" in capsys.readouterr().err


def test_a_job_with_a_structure_is_decoded_with_it(folder: Path, tmp_path: Path, local_ray: None) -> None:
    """The properties of the schema are not in the order of their names, which decides the text."""
    schema = "{type: object, properties: {text: {type: string, maxLength: 6}, kind: {enum: [a, b]}}, "
    schema += "required: [text, kind], additionalProperties: false}"
    job = command(folder, tmp_path / "out", f"output={{json_schema: {schema}}}", "sampling.max_new_tokens=40")
    assert caption.main(job) == 0
    rows = [row for path in (tmp_path / "out/data").glob("*") for row in pq.read_table(path).to_pylist()]
    assert all(row["generated_text"].startswith('{"text": "') for row in rows)
    assert verify.main([str(tmp_path / "out"), "--share", "1"]) == verify.EQUAL


def test_an_audited_job_is_compared_by_its_loss(
    folder: Path, tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = "{drafter: {kind: model}, tree: {kind: chain, length: 5}, acceptance: {kind: typical}}"
    audit = "{share: 1.0, metric: edit}"
    assert caption.main(command(folder, tmp_path / "out", f"method={lossy}", f"audit={audit}")) == 0
    rows = [row for path in (tmp_path / "out/data").glob("*") for row in pq.read_table(path).to_pylist()]
    mean = sum(row["audit_loss"] for row in rows) / NUM_ROWS
    assert 0 < mean < 1
    capsys.readouterr()
    assert verify.main([str(tmp_path / "out"), "--share", "1", "--metric", "edit"]) == verify.EQUAL
    assert f"retention    {1 - mean:.2%} [" in capsys.readouterr().out


def test_rows_with_one_id_are_reported(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row is there twice, with other tokens the second time."""
    path = sorted((copy / "data").glob("*.parquet"))[0]
    table = pq.read_table(path)
    column = table.schema.get_field_index("token_ids")
    tokens = table["token_ids"].to_pylist()
    again = table.slice(2, 1).set_column(
        column, table.schema.field(column), pa.array([tokens[3]], pa.list_(pa.int32()))
    )
    pq.write_table(pa.concat_tables([table, again]).replace_schema_metadata(table.schema.metadata), path)
    assert verify.main([str(copy), "--share", "1"]) == verify.DIFFERENT
    out = capsys.readouterr().out
    own = table["sample_id"][2].as_py()
    assert f"repeated     1 ids have several rows: {own}" in out
    assert f"damaged      1 file (jobs.check): data/{path.name}: it" in out
    assert [difference["sample_id"] for difference in differences(copy)] == [own]
    record = newest_record(copy)
    assert (record["num_repeated_ids"], record["num_damaged_files"], record["num_equal"]) == (1, 1, 24)


def test_repeated_ids_outside_of_the_share_are_reported(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sorted((copy / "data").glob("*.parquet"))[1]
    path.with_name("part-000090.parquet").write_bytes(path.read_bytes())
    assert verify.main([str(copy), "--share", "0.1", "--seed", "3"]) == verify.DIFFERENT
    assert "repeated     8 ids have several rows: " in capsys.readouterr().out
