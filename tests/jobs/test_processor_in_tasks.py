"""Whole jobs with the processor in tasks and in the actor: equal rows, for shipped pairs on real files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError, load_job
from configs.presets import preset
from configs.schema import CaptionJobConfig
from jobs import caption
from models.target import Target
from pipeline.run.plan import make_plan
from zoo import demo

ROOT = Path(__file__).resolve().parents[2]
ZOO = ROOT / "zoo/checkpoints"
NUM_SCENES = 32
TELEMETRY = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "acceptance_histogram", "degraded")
"""Fields that do not depend on other rows in the batch."""
pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Scenes in Parquet, of which one is no image, and motions as mp4 files."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "parquet").mkdir()
    demo.write_parquet(demo.draw_rows(demo.NUM_SCENES, demo.SEED)[:NUM_SCENES], folder / "parquet" / "shard")
    demo.write_videos(folder / "videos", 4, demo.VIDEO_SEED)
    return {"zoo_caption": folder / "parquet", "zoo_videos": folder / "videos"}


def overrides_of(name: str, sources: dict[str, Path], output: Path, *more: str) -> tuple[Path, list[str]]:
    path, own = preset(name)
    kind = "video" if path.stem == "zoo_videos" else "caption"
    overrides = [f"source.path={sources[path.stem]}", f"sink.path={output}", "job.progress=false", "pool.slots=8"]
    models = [f"model.target.path={ZOO}/{kind}_target", f"model.drafter.path={ZOO}/{kind}_drafter"]
    return path, [*own, *overrides, *models, "sampling.max_new_tokens=12", *more]


def rows_of(output: Path) -> dict[str, dict[str, Any]]:
    """All rows by id, without times and other values that depend on the batch, whose size also changes the last digits
    of a mean log-probability."""
    rows = [row for path in sorted(output.glob("*/*.parquet")) for row in pq.read_table(path).to_pylist()]
    for row in rows:
        row["telemetry"] = {name: row["telemetry"][name] for name in TELEMETRY}
        row["mean_logprob"] = round(row["mean_logprob"], 4)
    assert len({row["sample_id"] for row in rows}) == len(rows)
    return {row["sample_id"]: row for row in rows}


@pytest.mark.parametrize(
    ("name", "more", "num_rows", "keeps_pixels"),
    [
        ("zoo_sd_chain", (), NUM_SCENES, False),
        ("zoo_tabed_mt", (), NUM_SCENES, False),
        ("zoo_sd_chain_caption", (), NUM_SCENES, True),
        ("zoo_video_sd_pruned", ("pool.decode_cpus=0.5",), 4, False),
        ("zoo_video_sd", ("source.video.clip_s=1.5",), 8, False),
    ],
)
def test_rows_are_equal_with_the_processor_in_tasks_and_in_actors(
    name: str, more: tuple[str, ...], num_rows: int, keeps_pixels: bool, sources: dict[str, Path], tmp_path: Path
) -> None:
    rows_by_processor = {}
    for processor in ("actor", "tasks"):
        output = tmp_path / processor
        path, overrides = overrides_of(name, sources, output, *more, f"pool.processor={processor}")
        plan = make_plan(load_job(CaptionJobConfig, path, overrides))
        assert (plan.processing is not None) == (processor == "tasks")
        if plan.processing is not None:
            assert plan.processing.keeps_pixels == keeps_pixels
        caption.run(plan)
        rows_by_processor[processor] = rows_of(output)
    assert len(rows_by_processor["tasks"]) == num_rows
    assert sum(not row["error_type"] for row in rows_by_processor["tasks"].values()) >= num_rows - 1
    assert rows_by_processor["tasks"].keys() == rows_by_processor["actor"].keys()
    for sample_id, row in rows_by_processor["actor"].items():
        assert rows_by_processor["tasks"][sample_id] == row


def test_the_actor_runs_no_processor_if_tasks_did(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode in this process the rows of a task, with a target whose front end refuses to encode."""
    from actors.loading import pair
    from decoding.types import Request
    from pipeline.media.image_decoding import decode_table

    path, overrides = overrides_of("zoo_tabed_mt", sources, tmp_path / "out", "pool.processor=tasks")
    plan = make_plan(load_job(CaptionJobConfig, path, overrides))
    options = caption.decode_options(plan)
    decoded = decode_table(plan.read_first(6), options)
    assert decoded["images"].to_pylist() == [[]] * 6
    loaded = pair.load(plan.config)
    refuse: Callable[..., Any] = lambda *_: pytest.fail("the processor ran in the actor")  # noqa: E731
    monkeypatch.setattr(loaded.target.front_end, "encode", refuse)
    from actors.media import Media

    media = Media(decoded)
    requests = []
    for index in range(6):
        row = media.of(index)
        assert row.prompt is not None
        requests.append(Request(str(index), row.prompt, row.images, videos=row.videos, inputs=row.inputs))
    done = list(loaded.engine(4).run(requests))
    assert all(
        completion.error is None and not completion.telemetry.degraded and completion.num_visual_tokens
        for completion in done
    )
    assert isinstance(loaded.target, Target)


def test_processing_in_tasks_is_refused_for_drafters_that_need_pixels_of_clips(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    path, overrides = overrides_of(
        "zoo_sd_chain_caption", sources, tmp_path / "out", "pool.processor=tasks", "source.video.clip_s=2"
    )
    with pytest.raises(ConfigError, match=r"pool\.processor is 'tasks', but the drafter needs pixels"):
        make_plan(load_job(CaptionJobConfig, path, overrides))


def test_code_of_a_checkpoint_is_not_shipped_to_tasks(sources: dict[str, Path], tmp_path: Path) -> None:
    more = ("pool.processor=tasks", "model.target.allow_remote_code=true")
    path, overrides = overrides_of("zoo_sd_chain", sources, tmp_path / "out", *more)
    with pytest.raises(ConfigError, match=r"pool\.processor is 'tasks', but model\.target\.allow_remote_code"):
        make_plan(load_job(CaptionJobConfig, path, overrides))


@pytest.mark.parametrize(("num_gpus", "in_tasks"), [(0, False), (1, True)])
def test_auto_is_tasks_for_actors_on_gpus(
    num_gpus: int, in_tasks: bool, sources: dict[str, Path], tmp_path: Path
) -> None:
    path, overrides = overrides_of("zoo_sd_chain", sources, tmp_path / "out")
    plan = make_plan(load_job(CaptionJobConfig, path, overrides))
    pool = plan.config.pool.model_copy(update={"num_gpus": num_gpus})  # this Ray has no GPU, so no job may ask for one
    plan = replace(plan, config=plan.config.model_copy(update={"pool": pool}))
    assert (plan.processing is not None) == in_tasks


def test_outputs_of_processors_stay_within_their_share_of_memory(sources: dict[str, Path], tmp_path: Path) -> None:
    """Sizes are estimated before decoding, and contain every picture of other sizes."""
    path, overrides = overrides_of("zoo_sd_chain", sources, tmp_path / "out", "pool.processor=tasks")
    plan = make_plan(load_job(CaptionJobConfig, path, overrides))
    assert plan.processing is not None
    front_end, generator = plan.pair.front_end, np.random.default_rng(0)
    prompt = front_end.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}])
    for height, width in ((20, 50), (200, 90), (500, 700)):
        picture = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        packed = front_end.pack(prompt, [picture])
        assert packed.num_bytes <= plan.processing.sizes.packed_bytes([picture.nbytes], [])
        assert packed.num_unpacked_bytes <= plan.processing.sizes.unpacked_bytes([picture.nbytes], [])
