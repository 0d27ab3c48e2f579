"""An output inside the source, or a source inside the output, is refused by name before anything is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.manifest.overlap import refuse_overlap
from pipeline.run.plan_checks import open_output
from pipeline.training.output import claim_output
from tests.pipeline.attempts import job


def source(*paths: object) -> SourceConfig:
    return SourceConfig.model_validate({"kind": "images", "path": tuple(map(str, paths))})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("in/deep", "in-out", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "in/a.png").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "sink", "what"),
    [
        (["in"], "in", "same folder"),
        (["in"], "in/", "same folder"),
        (["in"], "in/out", "inside the source"),
        (["in"], "link/out", "inside the source"),
        (["link"], "in/deep/out", "inside the source"),
        (["link/deep"], "in", "inside the output"),
        (["in"], "other/../in/out", "inside the source"),
        (["other", "in"], "in/out", "inside the source"),
        (["in/deep"], "in", "inside the output"),
        (["in/a.png"], "in", "inside the output"),
        (["in/*/*.png"], "in/out", "inside the source"),
        (["in/**/*.png"], "in/deep/out", "inside the source"),
        (["in/**"], "in/out", "inside the source"),
        (["in/deep/*.png"], "in", "inside the output"),
        (["."], "out", "inside the source"),
    ],
)
@pytest.mark.parametrize("as_url", ["", "source", "sink"])
def test_an_output_inside_of_the_source_is_refused_by_name(
    root: Path, paths: list[str], sink: str, what: str, as_url: str
) -> None:
    own = [f"{'file://' if as_url == 'source' else ''}{root}/{path}" for path in paths]
    target = f"{'file://' if as_url == 'sink' else ''}{root}/{sink}"
    with pytest.raises(ConfigError, match=rf"^sink\.path: .*{what}") as refused:
        refuse_overlap(source(*own), target)
    assert f"source.path {own[-1]}" in str(refused.value)


@pytest.mark.parametrize(
    ("paths", "sink"),
    [
        (["in"], "in-out"),
        (["in/a.png"], "in/out"),
        (["in/*.png"], "in/out"),
        (["in/x*/*.png"], "in/out"),
        (["in"], "o"),
    ],
)
def test_an_output_beside_the_source_is_accepted(root: Path, paths: list[str], sink: str) -> None:
    refuse_overlap(source(*(root / path for path in paths)), str(root / sink))


@pytest.mark.parametrize(
    ("path", "sink", "what"),
    [
        ("memory://b/imgs", "memory://b/imgs/out", "inside the source"),
        ("memory://b", "memory://b/out/", "inside the source"),
        ("memory://b/out/data/*.parquet", "memory://b/out", "inside the output"),
        ("memory://b/imgs", "memory://b/imgs-out", ""),
        ("memory://b/imgs", "memory://c/imgs", ""),
        ("memory://b/imgs", "/b/imgs/out", ""),
    ],
)
def test_keys_of_a_store_are_compared_by_their_parts(path: str, sink: str, what: str) -> None:
    if not what:
        refuse_overlap(source(path), sink)
        return
    with pytest.raises(ConfigError, match=what):
        refuse_overlap(source(path), sink)


def test_one_bucket_under_two_names_of_the_scheme_is_one() -> None:
    pytest.importorskip("s3fs")
    with pytest.raises(ConfigError, match="inside the source"):
        refuse_overlap(source("s3://bucket/imgs"), "s3a://bucket/imgs/out")
    refuse_overlap(source("s3://bucket/imgs"), "s3://bucket/imgs-out")


def test_a_training_run_is_refused_by_the_name_of_its_own_field(root: Path) -> None:
    training: Any = SimpleNamespace(source=source(root / "in"), output=SimpleNamespace(path=str(root / "in/head")))
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"^output\.path: the output is inside the source"):
        claim_output(training, nothing, "main")
    assert not (root / "in/head").exists()


def test_a_job_is_refused_before_its_output_exists(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    config: Any = job({"kind": "images", "path": "in"}, "in/out")
    with pytest.raises(ConfigError, match="inside the source"):
        open_output(config)
    assert not (root / "in/out").exists()
    assert fsspec.filesystem("file").ls(str(root / "in/deep")) == []
