from __future__ import annotations

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from configs.load import ConfigError
from pipeline.storage.output_dir import OutputDir


@pytest.fixture(params=["local", "memory"])
def output(request, tmp_path) -> OutputDir:
    if request.param == "local":
        return OutputDir(str(tmp_path / "out"))
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists("/out"):
        filesystem.rm("/out", recursive=True)
    return OutputDir("memory://out")


def test_a_written_file_is_complete_and_can_be_replaced(output) -> None:
    output.make_folders()
    output.write_bytes("data/a.bin", b"first, longer")
    output.write_bytes("data/a.bin", b"second")
    assert output.filesystem.cat_file(output.path("data/a.bin")) == b"second"
    output.write_json("_job/x.json", {"é": [1]})
    assert json.loads(output.filesystem.cat_file(output.path("_job/x.json"))) == {"é": [1]}
    assert output.list_files("data") == ["a.bin"]
    assert output.list_files("_job") == ["x.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_partial_file(tmp_path, monkeypatch) -> None:
    output = OutputDir(str(tmp_path))
    output.write_bytes("data/a.bin", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            output.write_bytes("data/a.bin", b"new")
    assert (tmp_path / "data" / "a.bin").read_bytes() == b"old"
    assert output.list_files("_job") == []


def test_files_have_the_permissions_of_the_process(tmp_path) -> None:
    output = OutputDir(str(tmp_path))
    before = os.umask(0o027)
    try:
        output.write_bytes("data/a.bin", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "data" / "a.bin").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "used", ["data/x.parquet", "errors/x.parquet", "_job/summary.json", "_job/attempts/000001.json"]
)
def test_an_output_in_use_is_refused_by_name(output, used) -> None:
    output.refuse_if_used()
    output.write_bytes(used, b"x")
    with pytest.raises(ConfigError, match=rf"^sink\.path: .*out is not empty: it holds {used}"):
        output.refuse_if_used()


def test_empty_folders_and_foreign_files_do_not_count_as_use(output) -> None:
    output.make_folders()
    output.write_bytes("README", b"mine")
    output.refuse_if_used()


def test_a_writable_output_is_as_empty_after_the_check_as_before(output) -> None:
    output.check_writable()
    output.refuse_if_used()


def test_a_driver_without_atomic_creation_is_refused() -> None:
    class LooksFirst(MemoryFileSystem):
        pipe_file = AbstractFileSystem.pipe_file

    output = OutputDir("memory://out")
    output.__dict__["_opened"] = (LooksFirst(), "/out")
    with pytest.raises(
        ConfigError, match=r"^sink\.path: .* has no conditional put: the driver LooksFirst cannot create"
    ):
        output.check_writable()


def test_files_of_a_killed_start_do_not_count_as_use(output) -> None:
    output.write_bytes("_job/.probe-0123456789abcdef", b"probe")
    output.write_bytes("_job/tmp/000001.json.77-01234567", b"{}")
    output.refuse_if_used()


def test_concurrent_checks_of_one_output_do_not_interfere(tmp_path) -> None:
    output = OutputDir(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: output.check_writable(), range(32)))
    output.refuse_if_used()


def test_an_output_below_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"^sink\.path: .*file/out cannot be written: Not a directory"):
        OutputDir(str(tmp_path / "file" / "out")).check_writable()


def test_a_store_that_refuses_a_put_is_refused_with_its_reason(monkeypatch) -> None:
    output = OutputDir("memory://out")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(output.filesystem, "pipe_file", refuse)
    with pytest.raises(ConfigError, match=r"^sink\.path: memory://out cannot be written: Access Denied"):
        output.check_writable()


def test_a_store_that_keeps_other_bytes_is_noticed(monkeypatch) -> None:
    output = OutputDir("memory://torn")
    put = output.filesystem.pipe_file
    monkeypatch.setattr(output.filesystem, "pipe_file", lambda path, data, **kw: put(path, data[:-1], **kw))
    with pytest.raises(OSError, match="5 bytes were sent and 4 are stored"):
        output.write_bytes("data/x", b"12345")


def test_a_url_without_a_driver_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sink\.path: nosuchscheme://bucket/out cannot be opened"):
        OutputDir("nosuchscheme://bucket/out").check_writable()


def test_an_attempt_is_taken_once(output) -> None:
    assert output.take_attempt({"job_id": "a"}) == 1
    record = json.loads(output.filesystem.cat_file(output.path("_job/attempts/000001.json")))
    assert len(record.pop("taken_by")) == 16
    assert record == {
        "attempt": 1,
        "job_id": "a",
    }
    with pytest.raises(ConfigError, match=r"^sink\.path: another job has taken attempt 1 of"):
        output.take_attempt({"job_id": "b"})
    assert json.loads(output.filesystem.cat_file(output.path("_job/attempts/000001.json")))["job_id"] == "a"
    assert output.take_attempt({}, 2) == 2


def test_of_many_jobs_at_once_one_takes_the_attempt(tmp_path) -> None:
    def take(number: int) -> bool:
        try:
            OutputDir(str(tmp_path)).take_attempt({"job": number})
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(take, range(16))) == [False] * 15 + [True]


def test_credentials_are_never_shown() -> None:
    output = OutputDir("ftp://user:secret@host/out?key=secret")
    assert output.shown() == "ftp://host/out"
    assert "secret" not in output.shown("data/x.parquet")


def test_a_relative_path_means_the_folder_of_the_job_and_not_of_the_worker(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = OutputDir("out")
    sent = pickle.dumps(output)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pickle.loads(sent).write_bytes("data/x", b"x")
    assert (tmp_path / "out" / "data" / "x").read_bytes() == b"x"


def test_a_sent_output_opens_for_itself(output) -> None:
    output.write_bytes("data/x", b"x")
    copy = pickle.loads(pickle.dumps(output))
    assert copy == output
    assert copy.list_files("data") == ["x"]
