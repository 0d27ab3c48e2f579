"""The converter turns published files into folders that load without pickle, and reports what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.llamagen.checkpoints import load_gpt
from models.llamagen.convert import convert, main
from models.llamagen.shape import GPT_TYPE, VQ_TYPE, VqShape
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointError, CheckpointRef
from tests.models.llamagen.layouts import GRID, HEADS, official_weights
from tests.models.llamagen.test_checkpoints import expect_the_published_model, publish_lantern

CPU = torch.device("cpu")
VQ = VqShape(codebook_size=12, code_dim=4, channels=8, multipliers=(1, 2), num_res_blocks=1, latent_dim=8)


def test_a_published_gpt_becomes_a_folder_of_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": official_weights("text"), "steps": 3}, tmp_path / "t2i.pt")
    out = tmp_path / "out"
    assert main([str(tmp_path / "t2i.pt"), str(out), "--grid", str(GRID), "--heads", str(HEADS)]) == 0
    output = capsys.readouterr().out
    assert output == f"{out}: a GPT for images of 3 x 3 codes from a text: 32 wide, 2 layers, 4 heads\n"
    assert json.loads((out / "config.json").read_text())["model_type"] == GPT_TYPE
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    expect_the_published_model(load_gpt(CheckpointRef(str(out)), "auto", CPU), "text")


def test_lanterns_folder_becomes_ours(tmp_path: Path) -> None:
    result = convert(publish_lantern(tmp_path, "class"), tmp_path / "out", "bfloat16")
    assert result.startswith("a GPT for images of 3 x 3 codes from a class")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    expected = official_weights("class")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name].bfloat16()) for name in expected)


@pytest.mark.parametrize("wrapper", ["model", "ema", "state_dict"])
def test_a_published_vq_model_is_recognised_by_its_keys(tmp_path: Path, wrapper: str) -> None:
    torch.manual_seed(1)
    published = Vq(VQ).eval()
    torch.save({wrapper: published.state_dict()}, tmp_path / "vq.pt")
    message = convert(CheckpointRef(str(tmp_path / "vq.pt")), tmp_path / "out")
    assert message == "a VQ model with 12 codes of 2 x 2 pixels"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == VQ_TYPE
    again = load_vq(CheckpointRef(str(tmp_path / "out")), "auto", CPU)
    codes = torch.arange(12).reshape(1, 3, 4)
    with torch.inference_mode():
        torch.testing.assert_close(again.decode(codes), published.decode(codes))


def test_an_unconvertible_file_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": official_weights("text")}, tmp_path / "t2i.pt")
    torch.save({"model": Vq(VQ).state_dict()}, tmp_path / "vq.pt")
    torch.save({"a.weight": torch.zeros(1)}, tmp_path / "other.pt")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    cases = [
        (["t2i.pt", "out"], "the number of codes per image side is unknown"),
        (["t2i.pt", "out", "--grid", "3"], 'config.json must give "num_heads"'),
        (["t2i.pt", "out", "--grid", "0", "--heads", "4"], "grid must be a positive whole number, not 0"),
        (["t2i.pt", "taken"], "it holds a config.json already; take an empty folder"),
        (["t2i.pt", "vq.pt", "--grid", "3", "--heads", "4"], "vq.pt"),
        (["vq.pt", "out", "--grid", "3"], "this is no GPT, whose grid could be given"),
        (["other.pt", "out"], "this is something else (a.weight), not LlamaGen's GPT"),
        (["absent.pt", "out"], "no such file"),
    ]
    for (source, out, *options), message in cases:
        assert main([str(tmp_path / source), str(tmp_path / out), *options]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("error: ")
        assert message in output.err
        assert output.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    ref = publish_lantern(tmp_path, "text")
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"it holds a config\.json already"):
        convert(ref, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
