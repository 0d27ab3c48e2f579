"""Copies of checkpoints: made once for all processes, whole or not at all, and never those of a former object."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from configs.load import ConfigError
from models.heads.files import read_shapes
from pipeline.storage import checkpoint_cache, retries
from pipeline.storage.checkpoint_cache import StoredCheckpoint, chosen, copy, look, outline
from pipeline.storage.listing import Listed
from pipeline.storage.retries import RetryPolicy
from tests.object_store import S3, SECRET_KEY, Fault, make_bucket
from tests.waiting import until

pytestmark = pytest.mark.slow

BUCKET = "weights"
TENSORS = {f"layers.{index}.weight": torch.full((64, 1000), float(index)) for index in range(10)}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(checkpoint_cache.FOLDER_VARIABLE, str(tmp_path / "here"))
    monkeypatch.setattr(retries, "DEFAULT_POLICY", RetryPolicy(4, 0.0))
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    return tmp_path / "here"


@pytest.fixture(scope="module")
def bucket(s3: S3) -> Any:
    return make_bucket(BUCKET)


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def files() -> dict[str, bytes]:
    return {"config.json": b'{"model_type": "llama"}', "model.safetensors": save(TENSORS)}


def put(filesystem: Any, root: str, **changes: bytes | None) -> None:
    for name, data in {**files(), **changes}.items():
        if data is not None:
            filesystem.pipe_file(f"{root}/{name}", data)


def refusal(act: Any, *arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        act(*arguments)
    assert SECRET_KEY not in str(caught.value)
    return str(caught.value)


# --- what is looked at ---------------------------------------------------------------------------------------------


def test_the_revision_follows_names_sizes_and_tokens_and_nothing_else() -> None:
    def revision(*listed: Listed) -> str:
        return StoredCheckpoint("model.target", "s3://b/m", "b/m", "", listed).revision

    first, second = Listed("a", 3, "x"), Listed("b", 4, "y")
    assert revision(first, second) == revision(second, first)
    changed = (Listed("c", 4, "y"), Listed("b", 5, "y"), Listed("b", 4, "z"))
    assert len({revision(first, second), *(revision(first, other) for other in changed)}) == 4


def test_only_files_that_loading_reads_are_chosen() -> None:
    names = ["config.json", "README.md", "a.safetensors", "consolidated.00.safetensors", "b.bin", "own.py", "x.gguf"]
    listed = [Listed(name, 1, "") for name in names]
    assert [file.path for file in chosen(listed)] == ["config.json", "a.safetensors"]
    assert [file.path for file in chosen(listed, with_code=True)] == ["config.json", "own.py", "a.safetensors"]
    pickled = [Listed(name, 1, "") for name in ("config.json", "t2i.pt")]
    assert [file.path for file in chosen(pickled)] == ["config.json", "t2i.pt"]


def test_a_folder_without_a_checkpoint_is_refused_by_its_dotted_path(bucket: Any, memory: Any) -> None:
    assert refusal(look, f"s3://{BUCKET}/nothing", "model.target").startswith(
        f"model.target: s3://{BUCKET}/nothing: there is no such checkpoint"
    )
    memory.pipe_file("/bare/config.json", b"{}")
    assert "there are no weights" in refusal(look, "memory://bare", "model.target")
    assert "there is no such checkpoint" in refusal(look, "memory://absent/vq.pt", "model.vq")
    assert "weights are read only from s3," in refusal(look, "ftp://host/m", "model.target")
    put(memory, "/void", **{"model.safetensors": b""})
    assert "model.safetensors is empty" in refusal(look, "memory://void", "model.target")


def test_a_sparse_copy_has_every_header_and_no_weights_on_disk(memory: Any) -> None:
    put(memory, "/m")
    big = {"weight": torch.ones(4_000_000)}
    memory.pipe_file("/m/model.safetensors", save(big))
    drawn = outline(look("memory://m", "model.target"))
    file = drawn / "model.safetensors"
    assert file.stat().st_size == len(save(big))
    assert file.stat().st_blocks * 512 < 3 * checkpoint_cache.OUTLINE_BYTES
    with safe_open(file, framework="pt") as opened:
        assert opened.get_slice("weight").get_shape() == [4_000_000]
    assert (drawn / "config.json").read_bytes() == files()["config.json"]


def test_a_sparse_copy_of_torchs_format_has_its_shapes(memory: Any, tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2000, 600), "b": torch.ones(3)}}, tmp_path / "t2i.pt")
    memory.pipe_file("/g/t2i.pt", (tmp_path / "t2i.pt").read_bytes())
    memory.pipe_file("/g/config.json", b"{}")
    drawn = outline(look("memory://g/t2i.pt", "model.target"))
    assert read_shapes(drawn, ("model",)) == {"a": (2000, 600), "b": (3,)}
    assert (drawn.parent / "config.json").is_file()


def test_a_header_longer_than_the_prefix_of_a_sparse_copy_is_read_in_full(memory: Any) -> None:
    many = {f"a_long_name_of_a_tensor_{index:050}": torch.ones(1) for index in range(12_000)}
    put(memory, "/m", **{"model.safetensors": save(many)})
    assert len(read_shapes(outline(look("memory://m", "t")) / "model.safetensors")) == 12_000


@pytest.mark.parametrize(
    "torn",
    [b"\x01", b"\xff" * 100, save(TENSORS)[:-10], save(TENSORS) + b"x", (2).to_bytes(8, "little") + b"[]"],
    ids=["short", "huge header", "cut", "longer", "no object"],
)
def test_torn_weights_are_refused_before_they_are_fetched(torn: bytes, memory: Any, folder: Path) -> None:
    put(memory, "/m", **{"model.safetensors": torn})
    checkpoint = look("memory://m", "model.drafter")
    assert refusal(outline, checkpoint) == "model.drafter: memory://m: model.safetensors is torn or not safetensors"
    assert not (folder / "outlines" / checkpoint.key).exists()


# --- copies --------------------------------------------------------------------------------------------------------


def test_a_copy_is_read_once_and_used_again(bucket: Any, s3: S3, capsys: pytest.CaptureFixture[str]) -> None:
    put(bucket, f"{BUCKET}/once")
    checkpoint = look(f"s3://{BUCKET}/once", "model.target")
    copied = copy(checkpoint)
    assert torch.equal(load_file(copied / "model.safetensors")["layers.7.weight"], TENSORS["layers.7.weight"])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fetching", "fetched"]
    s3.asked.clear()
    assert copy(checkpoint) == copied
    assert s3.asked == []
    assert capsys.readouterr().out == ""


def test_a_changed_object_gets_a_copy_of_its_own(memory: Any) -> None:
    put(memory, "/m")
    before = look("memory://m", "model.target")
    first = copy(before)
    other = {name: value + 1 for name, value in TENSORS.items()}
    put(memory, "/m", **{"model.safetensors": save(other)})
    after = look("memory://m", "model.target")
    assert after.num_bytes == before.num_bytes
    second = copy(after)
    assert first != second
    assert float(load_file(first / "model.safetensors")["layers.7.weight"][0, 0]) == 7.0
    assert float(load_file(second / "model.safetensors")["layers.7.weight"][0, 0]) == 8.0


def test_an_object_that_changes_while_it_is_read_is_no_copy(memory: Any, folder: Path) -> None:
    put(memory, "/m")
    planned = look("memory://m", "model.target")
    put(memory, "/m")
    assert "it was changed while it was read" in refusal(copy, planned)
    assert not (folder / "copies" / planned.key).exists()


def test_a_truncated_copy_is_fetched_again(memory: Any) -> None:
    put(memory, "/m")
    checkpoint = look("memory://m", "model.target")
    weights = copy(checkpoint) / "model.safetensors"
    os.truncate(weights, 100)
    copy(checkpoint)
    assert len(load_file(weights)) == len(TENSORS)


def test_transient_faults_of_a_store_are_retried_and_an_unreachable_store_is_named(
    bucket: Any, s3: S3, folder: Path
) -> None:
    put(bucket, f"{BUCKET}/faults")
    checkpoint = look(f"s3://{BUCKET}/faults", "model.target")
    with s3.failing(Fault("cut", "GET", "model.safetensors", 2), Fault("refuse", "GET", "config.json", 2)):
        copied = copy(checkpoint)
        assert [fault.times for fault in s3.faults] == [0, 0]
    assert len(load_file(copied / "model.safetensors")) == len(TENSORS)
    shutil.rmtree(folder)
    with s3.failing(Fault("refuse", "GET", "model.safetensors", 50)):
        message = refusal(copy, checkpoint)
    assert message.startswith(f"model.target: s3://{BUCKET}/faults: model.safetensors cannot be read: ")
    assert not (folder / "copies" / checkpoint.key).exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(
    memory: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, "/m")
    checkpoint = look("memory://m", "model.target")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 2_000_000))
    message = refusal(copy, checkpoint)
    assert message.startswith("model.target: memory://m: its copy needs 1.076 GB")
    assert f"{folder} has 2.000 MB free" in message
    assert "DRAFTFLEET_WEIGHTS" in message
    monkeypatch.undo()


def test_partial_copies_of_a_killed_process_are_deleted(memory: Any, folder: Path) -> None:
    put(memory, "/m")
    checkpoint = look("memory://m", "model.target")
    left = folder / "copies" / f"{checkpoint.key}.part"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (left / "stray.safetensors").write_bytes(b"of nobody")
    copied = copy(checkpoint)
    assert sorted(path.name for path in copied.iterdir()) == sorted(files())
    assert len(load_file(copied / "model.safetensors")) == len(TENSORS)


FETCH = f"""
import sys
from pipeline.storage.checkpoint_cache import copy, look
print(copy(look("s3://{BUCKET}/" + sys.argv[1], "model.target")), flush=True)
"""


def start(name: str, s3: S3) -> subprocess.Popen[str]:
    environment = {**os.environ, **s3.environment}
    command = [sys.executable, "-c", FETCH, name]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_read_the_weights_once(bucket: Any, s3: S3) -> None:
    put(bucket, f"{BUCKET}/pair")
    s3.asked.clear()
    both = [start("pair", s3), start("pair", s3)]
    results = [process.communicate(timeout=900)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(len(lines) for lines in results) == [1, 3]
    assert results[0][-1] == results[1][-1]
    assert [request for request in s3.asked if request == ("GET", f"/{BUCKET}/pair/model.safetensors")] == [
        ("GET", f"/{BUCKET}/pair/model.safetensors")
    ]


def test_a_killed_process_leaves_no_lock_and_no_usable_partial_copy(bucket: Any, s3: S3, folder: Path) -> None:
    put(bucket, f"{BUCKET}/killed")
    checkpoint = look(f"s3://{BUCKET}/killed", "model.target")
    with s3.failing(Fault("stall", "GET", "model.safetensors", 1)):
        process = start("killed", s3)
        until(lambda: not s3.faults[0].times or process.poll() is not None)
        assert process.poll() is None
        assert (folder / "copies" / f"{checkpoint.key}.part").is_dir()
        process.kill()
        process.communicate()
    assert not (folder / "copies" / checkpoint.key).exists()
    assert len(load_file(copy(checkpoint) / "model.safetensors")) == len(TENSORS)
