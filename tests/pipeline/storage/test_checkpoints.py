"""A job's checkpoints from anywhere: pinned, checked without weights, brought to the actor, under the job's names."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

import actors.loading.image_pair
import actors.loading.pair
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from pipeline.storage import checkpoint_cache, checkpoints
from pipeline.storage.checkpoints import CheckpointRevisions, check, fetched, replaced, sites
from tests import toys
from tests.toys.image_checkpoints import ImageFolders, write_checkpoints

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = {"kind": "parquet", "path": "in"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(checkpoint_cache.FOLDER_VARIABLE, str(tmp_path / "here"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "here"


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def upload(memory: Any, folder: Path, name: str) -> str:
    for file in folder.iterdir():
        memory.pipe_file(f"/{name}/{file.name}", file.read_bytes())
    return f"memory://{name}"


def toy(folder: Path) -> Path:
    folder.mkdir()
    toys.save("llama", folder)
    return folder


def caption_job(target: str, drafter: str | None = None, revision: str | None = None) -> CaptionJobConfig:
    model: dict[str, Any] = {"target": {"path": target, "dtype": "float32", "device": "cpu", "revision": revision}}
    if drafter is not None:
        model["drafter"] = {"path": drafter, "dtype": "float32", "device": "cpu"}
    data = {
        "source": SOURCE,
        "prompt": "Describe.",
        "model": model,
        "method": {"drafter": {"kind": "none" if drafter is None else "model"}},
        "sink": {"path": "out"},
    }
    return validate(CaptionJobConfig, data, "job.yaml")


# --- texts ---------------------------------------------------------------------------------------------------------


def test_a_pair_of_a_store_is_checked_pinned_and_loaded_under_its_urls(memory: Any, tmp_path: Path, here: Path) -> None:
    url = upload(memory, toy(tmp_path / "target"), "target")
    drafter = str(toy(tmp_path / "drafter"))
    job, info = check(caption_job(url, drafter), actors.loading.pair.check, runs_here=True)
    revision = checkpoint_cache.look(url, "").revision
    assert job.model.target.revision == revision
    assert job.model.drafter is not None
    assert job.model.drafter.revision is None
    assert info.target_id == f"{url}@{revision}"
    assert info.drafter_id.startswith(f"{drafter}@")
    assert info.revisions["target"] == revision
    assert not (here / "copies").exists()
    loaded = pickle.loads(pickle.dumps(checkpoints.load_pair))(job, None)
    assert (loaded.target_id, loaded.drafter_id, loaded.info.revisions) == (
        info.target_id,
        info.drafter_id,
        info.revisions,
    )
    local = actors.loading.pair.load(caption_job(str(tmp_path / "target")))
    assert torch.equal(loaded.target.head.weight, local.target.head.weight)


def test_a_job_whose_weights_are_folders_is_unchanged(tmp_path: Path) -> None:
    job = caption_job(str(toy(tmp_path / "target")))
    pinned, info = check(job, actors.loading.pair.check, runs_here=True)
    assert pinned == job
    assert info.revisions == actors.loading.pair.check(job).revisions
    assert fetched(job) is job


def test_shipped_models_are_found_from_any_folder_under_their_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"zoo/checkpoints/caption_{name}" for name in ("target", "drafter")]
    job = caption_job(*names)
    at_root, info_at_root = check(job, actors.loading.pair.check, True)
    monkeypatch.chdir(tmp_path)
    pinned, info = check(job, actors.loading.pair.check, True)
    assert pinned == at_root == job
    assert (info.revisions, info.target_id) == (info_at_root.revisions, info_at_root.target_id)
    assert info.drafter_id == info_at_root.drafter_id == f"{names[1]}@{info.revisions['drafter']}"
    assert checkpoints.load_pair(job, None).target_id == info.target_id
    with pytest.raises(ConfigError, match=r"model\.target: .*zoo/checkpoints/caption_target: it is revision .* f00d$"):
        check(caption_job(names[0], revision="f00d"), actors.loading.pair.check, True)
    toys.save("llama", tmp_path / names[0])  # a folder of one's own comes first
    assert check(caption_job(names[0]), actors.loading.pair.check, True)[1].revisions != info.revisions


def test_a_model_that_is_not_installed_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "IS_INSTALLED", True)
    reason = r"^model\.target: zoo/checkpoints/gone: this model is part of a checkout only; .* zoo/checkpoints/"
    with pytest.raises(ConfigError, match=reason):
        check(caption_job("zoo/checkpoints/gone"), actors.loading.pair.check, True)


def test_a_missing_revision_is_refused_before_anything_starts(memory: Any, tmp_path: Path) -> None:
    folder = toy(tmp_path / "target")
    url = upload(memory, folder, "target")
    with pytest.raises(ConfigError, match=r"^model\.target: memory://target: it is revision [0-9a-f]{16} now, and "):
        check(caption_job(url, revision="f00d"), actors.loading.pair.check, True)
    with pytest.raises(ConfigError, match=r"^model\.target: .*/target: it is revision [0-9a-f]{16}, and .* f00d$"):
        check(caption_job(str(folder), revision="f00d"), actors.loading.pair.check, True)


def test_weights_that_changed_since_the_plan_are_refused_by_the_actor(memory: Any, tmp_path: Path) -> None:
    folder = toy(tmp_path / "target")
    url = upload(memory, folder, "target")
    job, _ = check(caption_job(url), actors.loading.pair.check, True)
    upload(memory, folder, "target")
    with pytest.raises(ConfigError, match=r"it is revision .* now, and model\.target\.revision asks for"):
        checkpoints.load_pair(job, None)


def test_refusals_name_the_url_and_not_the_copy(memory: Any, tmp_path: Path, here: Path) -> None:
    folder = toy(tmp_path / "target")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    url = upload(memory, folder, "target")
    with pytest.raises(ConfigError) as caught:
        check(caption_job(url), actors.loading.pair.check, True)
    assert str(caught.value).startswith("model.target: memory://target: it holds no tokenizer")
    assert str(here) not in str(caught.value)


def test_free_disk_is_checked_only_if_actors_run_on_this_machine(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(memory, toy(tmp_path / "target"), "target")
    monkeypatch.setattr(checkpoint_cache, "_free_bytes", lambda _: 10)
    check(caption_job(url), actors.loading.pair.check, runs_here=False)
    with pytest.raises(ConfigError, match=r"its copy needs .* DRAFTFLEET_WEIGHTS"):
        check(caption_job(url), actors.loading.pair.check, runs_here=True)


def test_only_checkpoints_that_the_method_loads_are_fetched() -> None:
    job = caption_job("memory://target", "memory://drafter")
    assert [site.where for site in sites(job)] == ["model.target", "model.drafter"]
    contexts = [{"kind": "full"}, {"kind": "caption", "path": "owner/small"}]
    data = json.loads(job.model_dump_json())
    data["method"] |= {"contexts": contexts}
    captioned = validate(CaptionJobConfig, data, "job.yaml")
    assert [site.where for site in sites(captioned)][2:] == ["method.contexts.1"]
    changed = replaced(captioned, ("method", "contexts", "1"), {"path": "/elsewhere"})
    assert [site.section.path for site in sites(changed)][2:] == ["/elsewhere"]
    assert changed.method.contexts[0] == captioned.method.contexts[0]
    data["method"] = {"drafter": {"kind": "lookup"}}
    assert [site.where for site in sites(validate(CaptionJobConfig, data, "job.yaml"))] == ["model.target"]


# --- images and training --------------------------------------------------------------------------------------------


def image_job(model: dict[str, str], folders: ImageFolders) -> SynthesizeJobConfig:
    data = {
        "source": SOURCE,
        "prompt": "{caption}",
        "model": {name: {"path": path, "device": "cpu"} for name, path in model.items()},
        "method": {"drafter": {"kind": "eagle"}, "tree": {"kind": "chain", "length": 2}},
        "sink": {"path": "out"},
    }
    return validate(SynthesizeJobConfig, data, "job.yaml")


def test_an_image_pair_of_a_store_is_the_one_of_its_folders(memory: Any, folders: ImageFolders, here: Path) -> None:
    local = {"target": folders.text, "drafter": folders.drafters["eagle"], "vq": folders.vq, "condition": folders.t5}
    stored = {name: upload(memory, path.parent if path.suffix else path, name) for name, path in local.items()}
    stored["target"] += "/t2i.pt"
    job, info = check(image_job(stored, folders), actors.loading.image_pair.check, True)
    expected = actors.loading.image_pair.check(image_job({name: str(path) for name, path in local.items()}, folders))
    assert (info.target, info.image_px) == (expected.target, expected.image_px)
    assert info.target_id == f"memory://target/t2i.pt@{info.revisions['target']}"
    assert set(info.revisions) == set(local)
    painter = checkpoints.load_painter(job, None)
    assert [path.name for path in (here / "copies").iterdir() if path.is_dir()] == [
        checkpoint_cache.look(stored["vq"], "").key
    ]
    codes = torch.zeros(1, info.target.num_image_tokens, dtype=torch.int32).numpy()
    assert painter.paint(codes)[1].all()
    loaded: Any = checkpoints.load_pair(job, None)
    assert (loaded.target_id, loaded.drafter_id) == (info.target_id, info.drafter_id)
    plain = actors.loading.image_pair.load(image_job({name: str(path) for name, path in local.items()}, folders))
    assert torch.equal(loaded.target.gpt.output.weight, plain.target.gpt.output.weight)


def test_a_teachers_weights_come_from_a_store_too(memory: Any, tmp_path: Path) -> None:
    url = upload(memory, toy(tmp_path / "target"), "target")
    data = {"source": SOURCE, "prompt": "", "answer_column": "a", "target": {"path": url}, "output": {"path": "out"}}
    job = validate(TrainDrafterJobConfig, data, "job.yaml")
    pinned, revisions = check(job, lambda own: CheckpointRevisions({"target": "of an outline"}), True)
    assert revisions.revisions == {"target": pinned.target.revision}
    assert (Path(fetched(pinned).target.path) / "model.safetensors").read_bytes() == (
        tmp_path / "target/model.safetensors"
    ).read_bytes()


# --- the hub -------------------------------------------------------------------------------------------------------


class Hub:
    """Fake of `HfApi`."""

    def __init__(self, error: Exception | None = None, header_error: Exception | None = None) -> None:
        self.error, self.header_error = error, header_error

    def __call__(self) -> Hub:
        return self

    def model_info(self, path: str, revision: str | None, timeout: float, files_metadata: bool) -> Any:
        if self.error:
            raise self.error
        files = [SimpleNamespace(rfilename="model.safetensors", size=5_000_000_000)]
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def parse_safetensors_file_metadata(self, path: str, filename: str, revision: str) -> None:
        assert (filename, revision) == ("model.safetensors", COMMIT)
        if self.header_error is not None:
            raise self.header_error


def given_revision(job: CaptionJobConfig) -> CheckpointRevisions:
    """What loaders report for a hub id: the given commit, or a branch that they could not resolve."""
    return CheckpointRevisions({"target": job.model.target.revision or "main"})


def test_a_branch_of_the_hub_is_pinned_to_its_commit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub())
    job, info = check(caption_job("owner/name", revision="main"), given_revision, True)
    assert job.model.target.revision == COMMIT
    assert info.revisions == {"target": COMMIT}
    assert capsys.readouterr().out == f"weights  model.target: owner/name, 1 file, 5.000 GB, revision {COMMIT}\n"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_repository_that_is_closed_or_absent_is_refused(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    error = HfHubHTTPError.__new__(HfHubHTTPError)
    error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(error))
    with pytest.raises(ConfigError, match=rf"^model\.target: owner/name: the hub answers {status}: .*HF_TOKEN"):
        check(caption_job("owner/name"), given_revision, True)


def test_torn_weights_of_the_hub_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torn = huggingface_hub.errors.SafetensorsParsingError("its header is no JSON")
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(header_error=torn))
    with pytest.raises(ConfigError, match=r"^model\.target: owner/name: its header is no JSON$"):
        check(caption_job("owner/name"), given_revision, True)


def test_without_the_hub_a_commit_is_taken_and_a_branch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(OfflineModeIsEnabled("offline")))
    job, _ = check(caption_job("owner/name", revision=COMMIT), given_revision, True)
    assert job.model.target.revision == COMMIT
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = r"the commit of main cannot be determined: HF_HUB_OFFLINE is set, .*; give the commit in model\.target\.r"
    with pytest.raises(ConfigError, match=message):
        check(caption_job("owner/name", revision="main"), given_revision, True)
    kept = {"target": COMMIT}
    job, _ = check(caption_job("owner/name"), lambda own: CheckpointRevisions(kept), True)
    assert job.model.target.revision == COMMIT


def test_an_unreachable_hub_is_requested_once_and_refused_in_one_line(
    tmp_path: Path,
) -> None:
    """Against a server that ends every connection; the hub's client would try each file of both models many times."""
    asked = 0
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            nonlocal asked
            while not over.is_set():
                try:
                    client = server.accept()[0]
                except OSError:
                    return
                asked += not over.is_set()
                client.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        arguments = ["--config", str(ROOT / "configs/jobs/zoo_caption.yaml"), "--dry-run", f"sink.path={tmp_path}/out"]
        arguments += ["model.target.path=owner/target", "model.drafter.path=owner/drafter"]
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.png").touch()
        arguments += ["source.kind=images", f"source.path={tmp_path}/in"]
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "jobs.caption", *arguments],
            cwd=ROOT,
            env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        over.set()
        with contextlib.suppress(OSError):
            socket.create_connection(server.getsockname()).close()
        thread.join()
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert re.search(
        r"model\.target: owner/target: the hub does not answer, and it is not in the cache of this machine", lines[0]
    )
    assert 1 <= asked <= 2  # the client connects again once, when a connection of its pool ends
