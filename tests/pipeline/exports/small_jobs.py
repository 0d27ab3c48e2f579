"""Outputs of small jobs to export, and exports that are interrupted between two changes of files."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.load import validate
from configs.output import ExportJobConfig
from configs.pool import JobSectionConfig
from configs.schema import CaptionJobConfig
from pipeline.exports.run import ExportReport, run_exports
from pipeline.output.recorded_job import read_job
from tests.pipeline.attempts import job, run
from tests.pipeline.formats.shards import encode, tar_bytes

RED = encode("red")
CHANGES = ("link", "replace", "unlink", "mkdir", "fsync")
"""Functions of `os` before and after which a process is killed."""


def images(folder: Path, names: list[str]) -> None:
    """Image files, each with its own bytes."""
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode((number, 0, 0)))


def image_job(tmp_path: Path, names: list[str], rows_per_file: int = 3, **sections: Any) -> CaptionJobConfig:
    """A finished job on image files; the caption of `a.jpg` is `text of a.jpg#0`."""
    images(tmp_path / "in", names)
    source = {"kind": "images", "path": str(tmp_path / "in")}
    config = job(source, tmp_path / "out", sink={"rows_per_file": rows_per_file}, **sections)
    run(config)
    return config


def members(count: int) -> list[tuple[str, bytes]]:
    """Samples of a tar, each with an image and a JSON member."""
    entries: list[tuple[str, bytes]] = []
    for number in range(count):
        entries += [(f"d/{number:03d}.png", encode((number, 1, 2))), (f"d/{number:03d}.json", b'{"n": %d}' % number)]
    return entries


def tar_job(
    tmp_path: Path, tars: dict[str, bytes], fails: Callable[[str], bool] = lambda own: False, **source: Any
) -> CaptionJobConfig:
    """A finished job on tars."""
    (tmp_path / "in").mkdir(parents=True, exist_ok=True)
    for name, data in tars.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    config = job({"kind": "webdataset", "path": str(tmp_path / "in"), **source}, tmp_path / "out")
    run(config, fails=fails)
    return config


def some_tars() -> dict[str, bytes]:
    return {"a.tar": tar_bytes(members(5)), "b/c.tar": tar_bytes(members(3)), "e.tar.gz": tar_bytes(members(2), "w:gz")}


def export(output: Path | str, *sections: dict[str, Any]) -> list[ExportReport]:
    """Run exports of an output."""
    exports = validate(ExportJobConfig, {"exports": list(sections)}, "test").exports
    return run_exports(read_job(str(output), "--from"), exports, JobSectionConfig(progress=False))


def files_below(folder: Path) -> dict[str, bytes]:
    """Content of all files that a listing shows, by path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def records(output: Path, name: str) -> list[dict[str, Any]]:
    """The ledger records of the only export of a kind."""
    return [json.loads(path.read_text()) for path in sorted(output.glob(f"_job/exports/{name}-*/done/*.json"))]


@contextmanager
def interrupted(index: int, act: Callable[[], Any]) -> Iterator[None]:
    """Call `act` at the n-th passage, counted before and after every change of a file."""
    seen = 0
    true = {name: getattr(os, name) for name in CHANGES}

    def passage() -> None:
        nonlocal seen
        seen += 1
        if seen == index:
            act()

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            passage()
            result = true[name](*arguments, **options)
            passage()
            return result

        return call

    for name in CHANGES:
        setattr(os, name, watched(name))
    try:
        yield
    finally:
        for name, function in true.items():
            setattr(os, name, function)


def killed(action: Callable[[], Any], index: int) -> bool:
    """Run an action in a process that is killed at its n-th passage; return whether it was killed before its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which hold nothing here
        child = os.fork()
    if child == 0:
        code = 1
        try:
            with interrupted(index, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                action()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the export ended with {code}"
    return code != 0
