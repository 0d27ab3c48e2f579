"""Tests refused jobs: one clear message that names the dotted path or file, exit status 2, and no Ray."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from jobs import caption
from pipeline.cluster import ray_session

pytestmark = pytest.mark.usefixtures("no_ray")

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFTER = ROOT / "zoo/checkpoints/caption_target", ROOT / "zoo/checkpoints/caption_drafter"


def png_bytes(path: Path, grey: int = 100) -> bytes:
    Image.fromarray(np.full((8, 8, 3), grey, np.uint8)).save(path)
    return path.read_bytes()


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A valid job on two rows, which every case then spoils."""
    (tmp_path / "source").mkdir()
    data = png_bytes(tmp_path / "a.png")
    table = pa.table({"image": [data, data], "question": ["Describe the image.", "List it."], "n": [1, 2]})
    pq.write_table(table, tmp_path / "source/rows.parquet")
    path = tmp_path / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "source": {"kind": "parquet", "path": str(tmp_path / "source"), "columns": {"image": "image"}},
                "prompt": "{question}",
                "model": {"target": {"path": str(TARGET)}, "drafter": {"path": str(DRAFTER)}},
                "method": {"drafter": {"kind": "model"}},
                "sampling": {"max_new_tokens": 4},
                "pool": {"slots": 4, "batch_rows": 4, "max_context_tokens": 256},
                "sink": {"path": str(tmp_path / "out"), "keep_columns": ["n"]},
                "job": {"progress": False},
            }
        )
    )
    return path


Spoil = Callable[[Path], list[str]]


def overrides(*values: str) -> Spoil:
    return lambda folder: list(values)


def empty_source(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return [f"source.path={folder}/empty"]


def rowless_source(folder: Path) -> list[str]:
    pq.write_table(
        pa.table({"image": pa.array([], pa.binary()), "question": pa.array([], pa.string())}), folder / "none.parquet"
    )
    return [f"source.path={folder}/none.parquet", "sink.keep_columns=[]"]


def sink_below_a_file(folder: Path) -> list[str]:
    (folder / "file").write_text("in the way")
    return [f"sink.path={folder}/file/out"]


def used_output(folder: Path) -> list[str]:
    (folder / "out/data").mkdir(parents=True)
    (folder / "out/data/part.parquet").write_bytes(b"x")
    return []


def other_vocabulary(folder: Path) -> list[str]:
    """A copy of the drafter in whose tokenizer two words have changed places."""
    shutil.copytree(DRAFTER, folder / "other")
    path = folder / "other/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer))
    return [f"model.drafter.path={folder}/other"]


def schema_file(content: str) -> Spoil:
    def write(folder: Path) -> list[str]:
        (folder / "schema.json").write_text(content)
        return [f"output.json_schema={folder}/schema.json"]

    return write


CASES: dict[str, tuple[Spoil, list[str]]] = {
    "an unknown key": (overrides("sampling.max_tokens=3"), ["sampling.max_tokens", "is not a known key"]),
    "an unknown section": (overrides("samplign.top_k=3"), ["samplign", "is not a known key"]),
    "a wrong type": (overrides("pool.slots=many"), ["pool.slots", "valid integer"]),
    "a number as text": (overrides("pool.slots='4'"), ["pool.slots", "valid integer"]),
    "a value out of range": (overrides("sampling.top_p=1.5"), ["sampling.top_p", "less than or equal to 1"]),
    "an unknown choice": (overrides("method.tree.kind=bush"), ["method.tree", "bush"]),
    "an override without a value": (overrides("pool.slots"), ["section.field=value"]),
    "a pool that shrinks": (overrides("pool.min_size=3"), ["pool", "max_size (1) is smaller than min_size (3)"]),
    "a drafter without a checkpoint": (overrides("model.drafter=null"), ["model.drafter must name a checkpoint"]),
    "a checkpoint that is not there": (overrides("model.target.path=/nowhere/x"), ["model.target", "/nowhere/x"]),
    "a drafter that is not there": (overrides("model.drafter.path=/nowhere/y"), ["model.drafter", "/nowhere/y"]),
    "a drafter of another vocabulary": (other_vocabulary, ["model.drafter", "does not share the target's vocabulary"]),
    "a source that is not there": (overrides("source.path=/nowhere/z"), ["source.path", "/nowhere/z"]),
    "a source without files": (empty_source, ["source.path", "empty"]),
    "a source without rows": (rowless_source, ["source.path", "no rows"]),
    "an image column that is not there": (overrides("source.columns.image=photo"), ["source.columns.image", "photo"]),
    "a prompt column that is not there": (overrides("prompt='{subject}'"), ["prompt.text", "subject"]),
    "a kept column that is not there": (overrides("sink.keep_columns=[score]"), ["sink.keep_columns", "score"]),
    "a kept column with a name of ours": (overrides("sink.keep_columns=[status]"), ["sink.keep_columns", "status"]),
    "an id column that is not there": (overrides("source.id_column=key"), ["source.id_column", "key"]),
    "an output that cannot be written": (sink_below_a_file, ["sink.path", "file/out"]),
    "an output that is used": (used_output, ["sink.path", "data/part.parquet", "not empty"]),
    "two structures": (overrides("output.regex=a", "output.choices=[a]"), ["output", "exactly one of"]),
    "no structure": (overrides("output={}"), ["output", "exactly one of"]),
    "a schema that is not there": (
        overrides("output.json_schema=/nowhere/s.json"),
        ["output.json_schema", "/nowhere/s"],
    ),
    "a schema that is not JSON": (schema_file("{'a': 1}"), ["output.json_schema", "is not JSON"]),
    "a schema of a wrong type": (schema_file("[1]"), ["output.json_schema", "a schema is a JSON object"]),
    "a schema with an unknown type": (
        overrides("output.json_schema={type: strng}"),
        ["output.json_schema: ", "Invalid type: strng"],
    ),
    "a schema with an integer of 31 digits": (
        overrides("output.json_schema={type: integer, maximum: 1000000000000000000000000000000}"),
        ["output.json_schema: maximum: an integer of 31 digits is beyond"],
    ),
    "a schema that no value follows": (
        overrides("output.json_schema={type: integer, minimum: 5, maximum: 3}"),
        ["output.json_schema: ", "Unsatisfiable schema"],
    ),
    "a schema with an unsupported keyword": (
        overrides("output.json_schema={type: array, uniqueItems: true}"),
        ["output.json_schema: ", "uniqueItems"],
    ),
    "a schema with a remote reference": (
        overrides("output.json_schema={$ref: 'http://localhost/s'}"),
        ["output.json_schema: ", "http://localhost/s"],
    ),
    "a regex that does not parse": (overrides("output.regex='(ab'"), ["output.regex: ", "unclosed group"]),
    "a regex with look-ahead": (overrides("output.regex='(?=a)b'"), ["output.regex: ", "look-around"]),
    "a schema of infinite values": (
        overrides("output.json_schema={$ref: '#'}"),
        ["output.json_schema: no text can begin"],
    ),
    "a regex with costly masks": (
        overrides("output.regex='(a{1000}){1000}'"),
        ["output.regex: ", "use fewer repetitions"],
    ),
    "a choice that is too long": (
        overrides("output.choices=[a, the red circle in the upper left corner]"),
        ["output.choices.1: ", "more than sampling.max_new_tokens 4"],
    ),
    "a choice twice": (overrides("output.choices=[a, a]"), ["output: choices: ", "'a' is listed twice"]),
    "a structure with stop strings": (
        overrides("output.regex=a", "sampling.stop=[b]"),
        ["sampling.stop", "leave it out"],
    ),
    "a grammar drafter without a structure": (
        overrides("method.drafter={kind: grammar}", "model.drafter=null"),
        ["method", "there is none"],
    ),
    "forced tokens without a structure": (overrides("method.forced_tokens=true"), ["method", "there is none"]),
    "a grammar drafter on a tree": (
        overrides(
            "output.regex=a",
            "method={drafter: {kind: grammar}, tree: {kind: static, branching: [2, 1]}}",
            "model.drafter=null",
        ),
        ["method", "grammar"],
    ),
    "a relative output on a cluster": (
        overrides("job.ray_address=auto", "sink.path=out"),
        ["sink.path: out is relative", "on a cluster"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_invalid_job_is_refused_by_name_with_exit_status_2_and_without_ray(
    case: str, job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The costly mask takes half a second or more by the processor, usual ones a millisecond.
    monkeypatch.setattr("decoding.grammar.MAX_MASK_S", 0.1)
    spoil, expected = CASES[case]
    assert caption.main(["--config", str(job_file), *spoil(tmp_path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    # Ray of an earlier test may still print into the same stream.
    [refusal] = [line for line in output.err.splitlines() if line.startswith("refused: ")]
    assert output.err.endswith(f"{refusal}\n")
    for words in expected:
        assert words in refusal
    assert not (tmp_path / "out/_job/attempts").exists()


def test_a_job_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert caption.main(["--config", str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml: cannot be read: No such file or directory" in capsys.readouterr().err


def test_relative_paths_are_refused_in_an_uploaded_working_directory(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ray_session.INSIDE_SUBMITTED_JOB, "{}")
    assert caption.main(["--config", str(job_file), "source.path=shards"]) == 2
    assert "source.path: shards is relative, but the job runs from an uploaded working" in capsys.readouterr().err


def test_a_limit_below_one_is_refused_by_the_command_line(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        caption.main(["--config", str(job_file), "--limit", "0"])
    assert ended.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_the_first_prompt_and_writes_nothing(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert caption.main(["--config", str(job_file), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "1 file, " in output
    assert "2 rows, 1 span" in output
    assert "model+chain+exact (lossless): drafter model, tree chain length=5, acceptance exact" in output
    assert "1 × 4 slots on CPU" in output
    assert f"{tmp_path}/out" in output
    assert "first prompt (rows.parquet#0):\nUSER: <image>\nDescribe the image. ASSISTANT:" in output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_refuses_a_source_of_which_no_row_can_be_used(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"image": [b"no image"], "question": ["?"], "n": [1]}), tmp_path / "source/rows.parquet")
    assert caption.main(["--config", str(job_file), "--dry-run"]) == 2
    assert "source.path: the only row cannot be used: rows.parquet#0: not_an_image" in capsys.readouterr().err
