"""Tests the answers of a job's output: their choice, their join with source rows, what is frozen, and refusals."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from actors.training.samples import TrainingRow
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from configs.training import TrainDrafterJobConfig
from pipeline.manifest.manifest import PARTS
from pipeline.rows.schemas import result_schema
from pipeline.run.job_plan import ResumeOptions
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.shard import WHOLE, Shard
from pipeline.training import answers as answer_files
from pipeline.training.inputs import Inputs, open_inputs
from pipeline.training.output import claim_output
from pipeline.training.rows import read_rows
from tests import object_store
from tests.pipeline.attempts import job, make_rows, plan_of, save, start

Tokens = Callable[[str], list[int] | None]
LINES = {"a.txt": 7, "b.txt": 5}
EVERY = [f"{name}#{index}" for name, count in LINES.items() for index in range(count)]


def tokens_of(sample_id: str) -> list[int]:
    """Tokens that name their row: no two rows have the same."""
    return [EVERY.index(sample_id) + 10, 7, EVERY.index(sample_id) + 30, 2]


@pytest.fixture
def source(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, count in LINES.items():
        (folder / name).write_text("".join(f"what of {name} {index}?\n" for index in range(count)))
    return {"kind": "text", "path": str(folder)}


@pytest.fixture
def config(source: dict[str, Any], tmp_path: Path) -> CaptionJobConfig:
    return asking(source, tmp_path / "captions")


def asking(source: dict[str, Any], output: Path | str, **sections: Any) -> CaptionJobConfig:
    sink = {"keep_tokens": True, **sections.pop("sink", {})}
    return job(source, output, **{"prompt": {"text": "say: {text}"}, "sink": sink, **sections})


def publish(
    config: CaptionJobConfig,
    wanted: Iterable[str] = EVERY,
    tokens: Tokens = tokens_of,
    seed: int | None = None,
    shard: Shard = WHOLE,
    **options: Any,
) -> None:
    """Publish results of the wanted rows that are not done, in the order of the source or in a shuffled one."""
    names = set(wanted)
    plan, begun = start(plan_of(config, shard=shard, **options))
    schema = result_schema(partial=config.reports_partial)
    table = pa.concat_tables([schema.empty_table(), *make_rows(plan, begun.publisher.attempt)])
    order = [index for index, own in enumerate(table["sample_id"].to_pylist()) if own in names]
    if seed is not None:
        random.Random(seed).shuffle(order)
    table = table.take(pa.array(order, pa.int64()))
    if "token_ids" in plan.schema.names:
        made = pa.array([tokens(own) for own in table["sample_id"].to_pylist()], pa.list_(pa.int32()))
        table = table.append_column("token_ids", made).select(plan.schema.names)
    save(plan, begun, [table.slice(first, 2) for first in range(0, table.num_rows, 2)])


def training(config: CaptionJobConfig, **sections: Any) -> TrainDrafterJobConfig:
    data = {
        "source": {"kind": "job_output", "path": config.sink.path},
        "target": {"path": "fake"},
        "output": {"path": f"{Path(config.source.paths[0]).parent}/head"},
        **sections,
    }
    return validate(TrainDrafterJobConfig, data, "a test")


def begun(config: CaptionJobConfig, folder: Path, **limits: Any) -> Inputs:
    return open_inputs(training(config, training=limits)).begun(OutputDir(str(folder)))


def taught(inputs: Inputs) -> dict[str, list[int]]:
    """The tokens of every row that is read, each read once."""
    spans = inputs.spans()
    tables = [spans.read(number) for number in range(spans.num_spans)]
    pairs = [pair for table in tables for pair in zip(*table.select(["sample_id", "token_ids"]).to_pydict().values())]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def every(ids: Iterable[str]) -> dict[str, list[int]]:
    return {own: tokens_of(own) for own in ids}


# --- the join ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_answers_are_joined_with_their_rows_in_any_order_of_publication(
    seed: int | None, config: CaptionJobConfig, tmp_path: Path
) -> None:
    publish(config, seed=seed)
    inputs = begun(config, tmp_path / "head")
    assert taught(inputs) == every(EVERY)
    assert inputs.describe()["answers"]["num_rows"] == 12
    (first, *_) = read_rows(inputs.spans().read(0), training(config), inputs.decode_options(("<image>",)), None)
    assert isinstance(first, TrainingRow)
    assert first.messages[0]["content"] == [{"type": "text", "text": "say: what of a.txt 0?"}]
    assert first.answer_ids == (10, 7, 30, 2)


def test_rows_without_an_answer_are_not_read(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config, ["a.txt#1", "a.txt#6", "b.txt#0"])
    inputs = begun(config, tmp_path / "head")
    assert taught(inputs) == every(["a.txt#1", "a.txt#6", "b.txt#0"])
    assert [inputs.spans().datasource.num_samples] == [3]  # type: ignore[attr-defined]
    shutil.rmtree(tmp_path / "captions")
    publish(config, ["b.txt#4"])
    only = begun(config, tmp_path / "other")
    assert only.manifest.files["path"].to_pylist() == ["b.txt"]
    (tmp_path / "source/a.txt").unlink()  # a file without answers may be gone
    assert taught(open_inputs(training(config)).resumed(OutputDir(str(tmp_path / "other")))) == every(["b.txt#4"])


def test_errors_and_answers_without_training_tokens_are_skipped_and_counted(
    config: CaptionJobConfig, tmp_path: Path
) -> None:
    def tokens(own: str) -> list[int] | None:
        return {"a.txt#0": [], "a.txt#1": [2], "a.txt#2": list(range(17)), "a.txt#3": list(range(16))}.get(
            own, tokens_of(own)
        )

    plan, attempt = start(plan_of(config))
    table = pa.concat_tables(make_rows(plan, 1, lambda own: own in ("b.txt#0", "b.txt#3")))
    made = pa.array([tokens(own) for own in table["sample_id"].to_pylist()], pa.list_(pa.int32()))
    save(plan, attempt, [table.append_column("token_ids", made).select(plan.schema.names)])
    inputs = begun(config, tmp_path / "head", max_tokens=16)
    left = every([own for own in EVERY if own not in ("a.txt#0", "a.txt#1", "a.txt#2", "b.txt#0", "b.txt#3")])
    assert taught(inputs) == {**left, "a.txt#3": list(range(16))}
    assert inputs.describe()["answers"].items() >= {"num_results": 10, "num_too_short": 2, "num_too_long": 1}.items()


def png(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def test_rows_of_files_whose_number_of_rows_is_unknown_are_joined(tmp_path: Path) -> None:
    (tmp_path / "tars").mkdir()
    for name in ("x", "y", "z"):
        with tarfile.open(tmp_path / f"tars/{name}.tar", "w") as tar:
            for index in range(5):
                member = tarfile.TarInfo(f"{index}.png")
                member.size = len(png(index))
                tar.addfile(member, io.BytesIO(png(index)))
    wanted = ["x.tar#3", "z.tar#0", "z.tar#4"]
    config = asking({"kind": "webdataset", "path": str(tmp_path / "tars")}, tmp_path / "captions", prompt="What?")
    publish(config, wanted, lambda own: [int(own[-1]), 5])
    inputs = begun(config, tmp_path / "head")
    assert inputs.manifest.files["path"].to_pylist() == ["x.tar", "z.tar"]
    assert taught(inputs) == {own: [int(own[-1]), 5] for own in wanted}
    training_rows = read_rows(inputs.spans().read(0), training(config), inputs.decode_options(()), None)
    assert all(isinstance(row, TrainingRow) for row in training_rows)
    assert {
        row.answer_ids: int(row.images[0][0, 0, 0]) for row in training_rows if isinstance(row, TrainingRow)
    }.items() <= {(index, 5): index for index in range(5)}.items()


def test_rows_of_shards_are_joined_from_all_of_them(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config, shard=Shard(0, 2))
    inputs = begun(config, tmp_path / "one")
    some = taught(inputs)
    assert 0 < len(some) < 12
    publish(config, shard=Shard(1, 2), seed=3)
    assert taught(begun(config, tmp_path / "two")) == every(EVERY)


def test_an_output_in_an_object_store_is_read_like_a_folder(source: dict[str, Any], tmp_path: Path) -> None:
    object_store.running()
    object_store.make_bucket("answers")
    config = asking(source, "s3://answers/captions")
    publish(config, seed=4)
    assert taught(begun(config, tmp_path / "head")) == every(EVERY)
    with pytest.raises(ConfigError, match=r"s3://answers/other is no output of a job"):
        open_inputs(training(asking(source, "s3://answers/other")))
    with pytest.raises(ConfigError, match=r"^source\.path: s3://no-such-bucket/out"):
        open_inputs(training(asking(source, "s3://no-such-bucket/out")))


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [2, 5, 11, 12, 13])
def test_at_most_max_rows_are_chosen_and_always_the_same(most: int, config: CaptionJobConfig, tmp_path: Path) -> None:
    results = []
    for seed, rows_per_file in ((None, 10), (1, 10), (2, 1)):
        shutil.rmtree(tmp_path / "captions", ignore_errors=True)
        sink = config.sink.model_copy(update={"rows_per_file": rows_per_file})
        publish(config.model_copy(update={"sink": sink}), seed=seed)
        results.append(taught(begun(config, tmp_path / f"head{seed}", max_rows=most)))
        assert len(results[-1]) == min(most, 12)
    assert results[0] == results[1] == results[2]


def test_without_max_rows_the_bound_is_that_of_the_module(
    config: CaptionJobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(config)
    few = taught(begun(config, tmp_path / "few", max_rows=4))
    monkeypatch.setattr("pipeline.training.inputs.MAX_ANSWERS", 4)
    assert taught(begun(config, tmp_path / "bound")) == few


def test_more_answers_add_no_earlier_row_to_the_chosen_ones(config: CaptionJobConfig, tmp_path: Path) -> None:
    """What is chosen of few answers and not of more was pushed out by an answer that is before it."""
    publish(config, EVERY[:8])
    before = taught(begun(config, tmp_path / "one", max_rows=4))
    publish(config, EVERY[8:])
    after = taught(begun(config, tmp_path / "two", max_rows=4))
    assert len(before) == len(after) == 4
    assert set(after) & set(EVERY[:8]) <= set(before)


# --- what is frozen ------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_answers_while_the_job_continues(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config, EVERY[:3])
    made = training(config)
    output = claim_output(made, open_inputs(made), "t0")
    record = json.loads((tmp_path / "head/_job/run.json").read_text())
    publish(config, EVERY[3:9])
    (tmp_path / "source/c.txt").write_text("a file that the job lists when it goes on\n")
    publish(config)
    assert len(OutputDir(config.sink.path).list_files(PARTS)) == 2
    assert claim_output(made, open_inputs(made), "t0") == output
    resumed = open_inputs(made).resumed(output)
    assert taught(resumed) == every(EVERY[:3])
    assert json.loads((tmp_path / "head/_job/run.json").read_text()) == record
    assert resumed.describe() == record["source"]
    assert record["source"]["answers"]["num_rows"] == 3


def test_a_run_whose_stored_answers_are_others_is_refused(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config, EVERY[:3])
    made = training(config)
    output = claim_output(made, open_inputs(made), "t0")
    stored = tmp_path / "head" / answer_files.ANSWERS
    whole = stored.read_bytes()
    stored.write_bytes(whole[:100])
    with pytest.raises(ConfigError, match=r"answers\.parquet cannot be read .* remove the folder"):
        claim_output(made, open_inputs(made), "t0")
    table = pq.read_table(pa.BufferReader(whole))
    pq.write_table(table.slice(1), stored)
    with pytest.raises(ConfigError, match=r"source\.answers\.num_rows, source\.answers\.sha256"):
        claim_output(made, open_inputs(made), "t0")
    stored.unlink()
    with pytest.raises(ConfigError, match=r"answers\.parquet cannot be read"):
        open_inputs(made).resumed(output)


def test_a_run_does_not_resume_on_a_recreated_output(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config, EVERY[:3])
    made = training(config)
    claim_output(made, open_inputs(made), "t0")
    shutil.rmtree(tmp_path / "captions")
    publish(asking({"kind": "text", "path": config.source.path}, config.sink.path, prompt="else: {text}"))
    with pytest.raises(ConfigError, match=r"source\.config_fingerprint changed"):
        claim_output(made, open_inputs(made), "t0")


def test_rows_that_changed_under_their_answers_are_refused(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config)
    inputs = begun(config, tmp_path / "head")
    path = tmp_path / "source/a.txt"
    path.write_text(path.read_text() + "another line\n")
    with pytest.raises(ConfigError, match=r"source\.path: a\.txt: other \(size, etag or time\) than when the job"):
        open_inputs(training(config)).resumed(OutputDir(str(tmp_path / "head")))
    path.unlink()
    with pytest.raises(ConfigError, match=r"source\.path: a\.txt: gone, and the job in .* has read it"):
        open_inputs(training(config)).begun(OutputDir(str(tmp_path / "other")))
    assert not (tmp_path / "other").exists()
    shutil.rmtree(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"source\.path: .*\n\(it is the source of the job in "):
        open_inputs(training(config)).begun(OutputDir(str(tmp_path / "other")))
    assert inputs.answers is not None


def test_no_training_sample_joins_an_answer_with_a_row_of_another_id(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    pq.write_table(pa.table({"id": ["p", "q", "r"], "ask": ["x", "y", "z"]}), rows / "a.parquet")
    source = {"kind": "parquet", "path": str(rows), "id_column": "id"}
    config = asking(source, tmp_path / "captions", prompt="{ask}")
    publish(config, ["p", "q", "r"], lambda own: [ord(own), 3])
    inputs = begun(config, tmp_path / "head")
    assert taught(inputs) == {own: [ord(own), 3] for own in "pqr"}
    pq.write_table(pa.table({"id": ["p", "r", "q"], "ask": ["x", "z", "y"]}), rows / "a.parquet")
    with pytest.raises(ConfigError, match=r"the row \{'sample_id': 'r', .* is not the row \{'sample_id': 'q', "):
        taught(inputs)


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"target": {"path": "another/model"}}}, "target: fake is another target than another/model"),
        (
            {"model": {"target": {"path": "fake", "dtype": "bfloat16", "quantization": "int8"}}},
            "target: the answers in .* are those of the target in int8",
        ),
        (
            {
                "model": {"target": {"path": "fake"}, "drafter": {"path": "small"}},
                "method": {"name": "loose", "drafter": {"kind": "model"}, "acceptance": {"kind": "typical"}},
            },
            "has the lossy method 'loose', which accepts tokens .* method.acceptance.kind=exact",
        ),
        ({"columns": {"prompts": "text"}, "prompt": {"text": "{prompt}"}}, "has columns.prompts, so a row"),
        ({"sink": {"keep_tokens": False}}, "did not keep its tokens, .* sink.keep_tokens=true"),
    ],
)
def test_answers_that_cannot_train_this_drafter_are_refused(
    sections: dict[str, Any], message: str, source: dict[str, Any], tmp_path: Path
) -> None:
    config = asking(source, tmp_path / "captions", **sections)
    start(plan_of(config))
    with pytest.raises(ConfigError, match=message):
        open_inputs(training(config))


def test_clips_are_refused(tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos/a.mp4").write_bytes(b"not read")
    source = {"kind": "videos", "path": str(tmp_path / "videos"), "video": {"clip_s": 2.0}}
    config = asking(source, tmp_path / "captions", prompt="What?")
    start(plan_of(config))
    with pytest.raises(ConfigError, match=r"has source\.video\.clip_s, so a row"):
        open_inputs(training(config))


def test_another_revision_of_the_target_is_refused(config: CaptionJobConfig) -> None:
    publish(config)
    made = training(config)
    open_inputs(made).check_target(made, "t0")
    with pytest.raises(ConfigError, match=r"target: fake is revision t1, and the answers .* of revision t0"):
        open_inputs(made).check_target(made, "t1")


def test_mixed_configurations_are_refused(config: CaptionJobConfig, source: dict[str, Any], tmp_path: Path) -> None:
    publish(config, EVERY[:6])
    other = asking(source, config.sink.path, prompt="else: {text}")
    publish(other, resume=ResumeOptions(allow_mixed=True))
    with pytest.raises(ConfigError, match=r"mixes configurations \(data/part-000000\.parquet was made by"):
        begun(config, tmp_path / "head")


def test_a_folder_that_is_no_output_is_refused(config: CaptionJobConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="captions is no output of a job: it holds no manifest"):
        open_inputs(training(config))
    (tmp_path / "captions/data").mkdir(parents=True)
    pq.write_table(pa.table({"sample_id": ["a.txt#0"], "token_ids": [[1, 2]]}), tmp_path / "captions/data/a.parquet")
    with pytest.raises(ConfigError, match="captions is no output of a job"):
        open_inputs(training(config))


def test_a_synthesis_output_is_refused(config: CaptionJobConfig) -> None:
    publish(config)
    output = OutputDir(config.sink.path)
    record = output.read_attempt(1)
    record["config"]["sampling"]["num_images_per_prompt"] = 1
    output.write_json("_job/attempts/000001.json", record)
    with pytest.raises(ConfigError, match="is the output of a synthesis job"):
        open_inputs(training(config))


def test_an_output_without_answers_yet_is_refused(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config, [])
    with pytest.raises(ConfigError, match="holds no answers to learn from"):
        begun(config, tmp_path / "head")
    publish(config, EVERY[:1], lambda own: [2])
    with pytest.raises(ConfigError, match=r'no answers to learn from .*"num_too_short": 1'):
        begun(config, tmp_path / "head")


def test_a_torn_or_foreign_result_file_is_refused(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config)
    part = tmp_path / "captions/data/part-000000.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"data/part-000000\.parquet: it is torn"):
        begun(config, tmp_path / "head")
    pq.write_table(pq.read_table(pa.BufferReader(whole)).replace_schema_metadata(None), part)
    with pytest.raises(ConfigError, match=r"data/part-000000\.parquet: no job has signed it"):
        begun(config, tmp_path / "head")


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "What?"},
        {"answer_column": "a"},
        {"answer_prefix": ""},
        {"image": {"columns": {"codes": "c", "label": "l"}}},
    ],
)
def test_columns_that_a_job_output_defines_are_refused(given: dict[str, Any], config: CaptionJobConfig) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))}: a source of kind job_output has its own"):
        training(config, **given)
    again = TrainDrafterJobConfig.model_validate_json(training(config).model_dump_json())  # as workers get it
    assert again == training(config)


def test_a_head_is_not_written_into_the_output_or_its_source(config: CaptionJobConfig, tmp_path: Path) -> None:
    publish(config)
    for folder in ("captions/head", "source/head"):
        made = training(config, output={"path": str(tmp_path / folder)})
        with pytest.raises(ConfigError, match=r"output\.path: "):
            claim_output(made, open_inputs(made), "t0")


def test_a_caption_job_does_not_read_an_output_of_this_kind(config: CaptionJobConfig) -> None:
    with pytest.raises(ConfigError, match=r"source\.kind"):
        validate(CaptionJobConfig, {**config.resolved(), "source": {"kind": "job_output", "path": "out"}}, "a test")
