"""Outputs that commit fe2a2ed9 began resume with their finished rows. One attempt of the caption job was killed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError, load_job
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from jobs import caption, synthesize
from pipeline.output.recorded_job import read_job
from pipeline.run.plan import make_plan
from pipeline.synthesis.plan import make_plan as make_synthesis_plan

OLD = Path(__file__).parent / "old_outputs"
BEFORE = ("source.convert_to_srgb=false",)
"""Overrides of keys whose defaults have changed since: the values with which the output was begun."""
KINDS: dict[str, tuple[ModuleType, Any, Any, tuple[str, ...], int, int]] = {
    "caption": (caption, CaptionJobConfig, make_plan, BEFORE, 4, 2),
    "synthesize": (synthesize, SynthesizeJobConfig, make_synthesis_plan, (), 2, 1),
}
"""Command, model of its configuration, function that plans it, overrides, and numbers of finished and missing rows."""


def restored(kind: str, folder: Path) -> Path:
    """Copy an old output and its source to `folder`, with its paths and times of files; return the job file."""
    shutil.copytree(OLD / kind, folder, dirs_exist_ok=True)
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".yaml"):
            path.write_text(path.read_text().replace("ROOT", str(folder)))
    part = folder / "output/_job/manifest/part-00000.parquet"
    listing = pq.read_table(part)
    metadata = {key: value.replace(b"ROOT", os.fsencode(folder)) for key, value in listing.schema.metadata.items()}
    pq.write_table(listing.replace_schema_metadata(metadata), part)
    root = Path(os.fsdecode(metadata[b"draftfleet.source_root"]))
    for row in listing.to_pylist():
        os.utime(root / row["path"], ns=(int(row["token"]), int(row["token"])))
    return folder / "job.yaml"


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    rows = ds.dataset(folder / "output/data", format="parquet").to_table().to_pylist()
    return {row["sample_id"]: row for row in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_output_is_planned_with_its_finished_rows(kind: str, tmp_path: Path) -> None:
    _, model, plan_of, overrides, num_done, num_missing = KINDS[kind]
    plan = plan_of(load_job(model, restored(kind, tmp_path), overrides))
    assert len(plan.prior.done) == num_done
    assert plan.datasource.num_samples == num_missing
    assert not plan.prior.inventory.strange


@pytest.mark.parametrize("override", BEFORE)
def test_a_changed_default_is_refused_by_its_name(override: str, tmp_path: Path) -> None:
    job_file = restored("caption", tmp_path)
    others = tuple(one for one in BEFORE if one != override)
    with pytest.raises(ConfigError, match=re.escape(override.partition("=")[0])):
        make_plan(load_job(CaptionJobConfig, job_file, others))


def test_an_old_record_has_the_values_with_which_its_rows_were_decoded(tmp_path: Path) -> None:
    restored("caption", tmp_path)
    source = read_job(str(tmp_path / "output"), "OUTPUT").config.source
    assert (source.convert_to_srgb, source.video.square_pixels) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_old_output_is_finished(kind: str, tmp_path: Path, local_ray: None) -> None:
    command, _, _, overrides, num_done, num_missing = KINDS[kind]
    job_file = restored(kind, tmp_path)
    before = rows_of(tmp_path)
    assert len(before) == num_done
    assert command.main(["--config", str(job_file), *overrides]) == 0
    after = rows_of(tmp_path)
    assert len(after) == num_done + num_missing
    assert {sample_id: after[sample_id] for sample_id in before} == before
