"""The archive for a cluster contains the code, the presets and the shipped models, and no other file."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from configs.load import ConfigError
from pipeline.cluster import code_archive
from pipeline.cluster.provenance import ROOT


def checkout(root: Path) -> Path:
    files = {
        "jobs/caption.py": "run()",
        "configs/mine.yaml": "source: {}",
        "zoo/checkpoints/pair/weights.bin": "w" * 100,
        "zoo/mine/model.safetensors": "m",
        "zoo/real/differences.safetensors": "d",
        "pyproject.toml": "[project]",
        ".env": "TOKEN=1",
        "jobs/.secret": "1",
        "jobs/__pycache__/caption.pyc": "x",
        "data/rows.parquet": "rows",
        ".git/HEAD": "ref",
        "tests/test_it.py": "assert True",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "jobs/link.py").symlink_to(root / ".env")
    return root


def test_the_archive_has_named_folders_without_hidden_files_caches_and_links(tmp_path: Path) -> None:
    root = checkout(tmp_path / "root")
    code_archive.pack(tmp_path / "a.zip", root=root)
    with zipfile.ZipFile(tmp_path / "a.zip") as made:
        assert made.namelist() == [
            *("configs/mine.yaml", "jobs/caption.py", "pyproject.toml"),
            *("zoo/checkpoints/pair/weights.bin", "zoo/mine/model.safetensors"),
        ]
        assert made.read("jobs/caption.py") == b"run()"


def test_equal_checkouts_make_equal_archives_whenever_they_are_packed(tmp_path: Path) -> None:
    digests = []
    for name, age_s in (("one", 1_700_000_000), ("two", 1_600_000_000)):
        root = checkout(tmp_path / name)
        for _, path in code_archive.shipped_files(root):
            os.utime(path, (age_s, age_s))
        code_archive.pack(tmp_path / f"{name}.zip", root=root)
        digests.append(hashlib.sha256((tmp_path / f"{name}.zip").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_job_files_outside_the_checkout_are_added_to_the_archive_and_presets_keep_their_path(tmp_path: Path) -> None:
    root = checkout(tmp_path / "root")
    (tmp_path / "far.yaml").write_text("far: 1")
    (root / "data/near.yaml").write_text("near: 1")
    archive = tmp_path / "a.zip"
    assert code_archive.pack(archive, tmp_path / "far.yaml", root) == "submitted/far.yaml"
    assert zipfile.ZipFile(archive).read("submitted/far.yaml") == b"far: 1"
    assert code_archive.pack(archive, root / "data/near.yaml", root) == "submitted/near.yaml"
    assert code_archive.pack(archive, root / "configs/mine.yaml", root) == "configs/mine.yaml"
    assert zipfile.ZipFile(archive).read("configs/mine.yaml") == b"source: {}"


def test_a_checkout_that_is_too_large_is_refused_with_its_largest_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = checkout(tmp_path / "root")
    (root / "zoo/big").mkdir()
    (root / "zoo/big/model.bin").write_bytes(os.urandom(300_000))
    monkeypatch.setattr(code_archive, "MAX_ARCHIVE_BYTES", 100_000)
    result = r"takes 0\.3 MB, and Ray takes 0\.1 MB at most; the largest parts are zoo/big"
    with pytest.raises(ConfigError, match=result):
        code_archive.pack(tmp_path / "a.zip", root=root)


def test_this_checkout_fits_and_holds_what_a_job_needs(tmp_path: Path) -> None:
    names = {name for name, _ in code_archive.shipped_files()}
    assert {"jobs/caption.py", "configs/jobs/demo_caption.yaml", "zoo/checkpoints/caption_target/config.json"} <= names
    assert {name.split("/")[0] for name in names} == {*code_archive.SHIPPED_FOLDERS, *code_archive.SHIPPED_FILES}
    assert code_archive.is_shipped("zoo/checkpoints/caption_target")
    assert not code_archive.is_shipped("zoo/checkpoints/gone")
    assert not code_archive.is_shipped("zoo/../docs/log.md")
    assert sum((ROOT / name).stat().st_size for name in names) < code_archive.MAX_ARCHIVE_BYTES
