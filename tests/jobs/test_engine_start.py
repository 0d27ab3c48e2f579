"""Jobs whose engine cannot start, or dies on every row, end with one sentence after a few processes."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import actors.loading.pair
from actors.serving.crash_ledger import HOPELESS_FROM_ROWS, MAX_LOAD_DEATHS
from jobs import caption
from jobs.terminal.exit_status import FAILED
from pipeline.run.graph import CaptionStages, RunContext, caption_dataset
from tests.jobs.poison import LoadPoisoned
from tests.jobs.stand_ins import FakePairInfo
from tests.jobs.unstartable import LoadKilled, LoadRaising

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


def run(tmp_path: Path, load: Any, words: str = "ask") -> int:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("".join(f"{words} {number}\n" for number in range(40)))
    sections = {
        "source": {"kind": "text", "path": str(tmp_path / "in")},
        "prompt": "{text}",
        "model": {"target": {"path": "fake"}},
        "pool": {"slots": 4, "batch_rows": 8},
        "sink": {"path": str(tmp_path / "out")},
        "job": {"progress": False},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(sections))
    checked = mock.patch.object(actors.loading.pair, "check", return_value=FakePairInfo())
    faked = functools.partial(_build, load)
    with checked, mock.patch.object(caption, "caption_dataset", faked):
        return caption.main(["--config", str(tmp_path / "job.yaml")])


def _build(fake: Any, config: Any, datasource: Any, num_spans: int, stages: CaptionStages, run: RunContext) -> Any:
    return caption_dataset(config, datasource, num_spans, replace(stages, load=fake), run)


@pytest.mark.parametrize(
    ("kind", "num_loads", "reason"),
    [
        (LoadRaising, 1, "an actor cannot load the models: RuntimeError: model.target: weights are damaged"),
        (
            LoadKilled,
            MAX_LOAD_DEATHS,
            f"the process of an actor ended {MAX_LOAD_DEATHS} times while it loaded the models",
        ),
    ],
)
def test_an_engine_that_cannot_be_loaded_ends_the_job(
    kind: type[LoadRaising], num_loads: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = tmp_path / "loads"
    loads.mkdir()
    assert run(tmp_path, kind(loads)) == FAILED
    assert len(list(loads.iterdir())) == num_loads
    output = capsys.readouterr().err
    assert f"the job was ended: {reason}" in output
    assert "Traceback" not in output
    assert "resume with: " in output


def test_an_engine_that_dies_on_every_row_ends_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    assert run(tmp_path, LoadPoisoned(deaths), "POISON") == FAILED
    assert HOPELESS_FROM_ROWS < len(list(deaths.iterdir())) <= 3 * HOPELESS_FROM_ROWS
    reason = f"{HOPELESS_FROM_ROWS} rows each ended the process of the stage 'engine' 3 times"
    assert f"the job was ended: {reason}" in capsys.readouterr().err
