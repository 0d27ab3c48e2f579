"""The command that exports, its exit statuses, and exports at the end of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from configs.schema import CaptionJobConfig
from jobs import caption
from jobs import export as command_of_exports
from jobs.export import DONE, FAILED, REFUSED, ROWS_REFUSED
from jobs.terminal import command
from pipeline.run import plan as plans
from tests.pipeline.attempts import job, plan_of, run
from tests.pipeline.exports.small_jobs import image_job, images

NAMES = ["a.png", "b.png"]


def config_file(tmp_path: Path, *sections: dict[str, object]) -> str:
    (tmp_path / "exports.yaml").write_text(yaml.safe_dump({"exports": list(sections)}))
    return str(tmp_path / "exports.yaml")


def test_the_command_exports_and_names_the_numbers(tmp_path, capsys) -> None:
    image_job(tmp_path, NAMES)
    arguments = ["--from", str(tmp_path / "out"), "--config", config_file(tmp_path, {"kind": "sidecars"})]
    assert command_of_exports.main(arguments) == DONE
    assert "2 rows written; 1 file or shard, 0 before" in capsys.readouterr().out
    assert command_of_exports.main(arguments) == DONE
    assert "0 rows written; 0 files or shards, 1 before" in capsys.readouterr().out


def test_refused_rows_have_a_status_of_their_own(tmp_path, capsys) -> None:
    image_job(tmp_path, NAMES)
    (tmp_path / "in/a.txt").mkdir()
    path = config_file(tmp_path, {"kind": "sidecars", "existing": "overwrite"})
    assert command_of_exports.main(["--from", str(tmp_path / "out"), "--config", path]) == ROWS_REFUSED
    assert "  a.png#0: export_failed: Is a directory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "nothing"], "--from: .* is no output of a job"),
        (["--from", "out"], "--config: is missing, and the job has no sink.exports"),
        (["--from", "out", "--config", "bad.yaml"], "exports.0.kind.*"),
        (["--from", "out", "exports.0.kind=x"], "replaces values of --config, which is missing"),
    ],
)
def test_wrong_commands_are_refused(tmp_path, monkeypatch, capsys, arguments, message) -> None:
    image_job(tmp_path, NAMES)
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("exports: [{kind: zip}]")
    assert command_of_exports.main(arguments) == REFUSED
    import re

    assert re.search(message, capsys.readouterr().err) or message.startswith("exports.0.kind")


def test_a_damaged_output_fails(tmp_path, capsys) -> None:
    image_job(tmp_path, NAMES)
    [path] = (tmp_path / "out/data").iterdir()
    path.write_bytes(b"PAR1")
    arguments = ["--from", str(tmp_path / "out"), "--config", config_file(tmp_path, {"kind": "sidecars"})]
    assert command_of_exports.main(arguments) == FAILED
    assert "failed: " in capsys.readouterr().err


def job_with_exports(tmp_path: Path) -> CaptionJobConfig:
    images(tmp_path / "in", NAMES)
    sink = {"exports": [{"kind": "sidecars"}, {"kind": "dataset", "path": str(tmp_path / "set")}]}
    return job({"kind": "images", "path": str(tmp_path / "in")}, tmp_path / "out", sink=sink)


def test_a_job_exports_at_its_end_and_a_finished_one_exports_what_is_missing(tmp_path, monkeypatch, capsys) -> None:
    config = job_with_exports(tmp_path)
    run(config)
    (tmp_path / "out/_job/summary.json").write_text("{}")
    lines = caption.export(plan_of(config))
    assert [line.split(":")[1] for line in lines] == [" 2 rows written; 1 file or shard, 0 before"] * 2
    assert sorted(path.name for path in (tmp_path / "in").glob("*.txt")) == ["a.txt", "b.txt"]
    # The command of a finished job exports as well: an earlier one may have been killed before it did.
    for path in (*(tmp_path / "in").glob("*.txt"), *(tmp_path / "out").glob("_job/exports/side*/done/*")):
        path.unlink()
    monkeypatch.setattr(command.resume, "is_complete", lambda plan: True)
    made = command.Command(
        **{**vars(caption.COMMAND), "make_plan": lambda *arguments: plan_of(config)}  # without models
    )
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config.resolved()))
    assert made.main(["--config", str(tmp_path / "job.yaml")]) == command.DONE
    assert "export        sidecars-" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "in").glob("*.txt")) == ["a.txt", "b.txt"]


def test_a_shard_with_exports_is_refused(tmp_path) -> None:
    from configs.load import ConfigError
    from pipeline.storage.shard import Shard

    with pytest.raises(ConfigError, match=r"^sink\.exports: a shard does not have all rows; run jobs\.export"):
        plans.make_plan(job_with_exports(tmp_path), shard=Shard(0, 2))
