"""Medusa heads: the public files are read unchanged, regardless of their configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.heads.formats import MEDUSA
from models.heads.loader import load_head, read_shape
from models.heads.writer import save_medusa
from models.loading.checkpoints import CheckpointError, CheckpointRef

VOCAB, HIDDEN = 7, 4
CPU = torch.device("cpu")


def public_weights(num_heads: int, num_blocks: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, Tensor] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            weights[f"{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator)
            weights[f"{head}.{block}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        weights[f"{head}.{num_blocks}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator)
    return weights


def publish(folder: Path, weights: dict[str, Tensor]) -> CheckpointRef:
    """The published configurations declare two heads, regardless of the number in the file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    torch.save(weights, folder / "medusa_lm_head.pt")
    return CheckpointRef(str(folder))


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_every_head_of_the_file_is_loaded_and_computes_the_equation(tmp_path: Path, num_blocks: int) -> None:
    weights = public_weights(5, num_blocks)
    ref = publish(tmp_path / "heads", weights)
    heads = load_head(MEDUSA, ref, "auto", CPU)
    assert heads.shape == read_shape(MEDUSA, ref)
    assert heads.shape.num_heads == 5
    state = torch.tensor([[0.5, -1.0, 2.0, 0.25]])
    for head in range(5):
        x = state
        for block in range(num_blocks):
            inner = x @ weights[f"{head}.{block}.linear.weight"].T + weights[f"{head}.{block}.linear.bias"]
            x = x + inner * inner.sigmoid()
        torch.testing.assert_close(heads.logits(head, state), x @ weights[f"{head}.{num_blocks}.weight"].T)


def test_heads_inside_a_whole_model_are_found(tmp_path: Path) -> None:
    weights = public_weights(3)
    folder = tmp_path / "whole"
    folder.mkdir()
    inside = {f"medusa_head.{name}": value for name, value in weights.items()}
    save_file(inside | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}, folder / "model.safetensors")
    heads = load_head(MEDUSA, CheckpointRef(str(folder)), "auto", CPU)
    assert {name: value.tolist() for name, value in heads.state_dict().items()} == {
        name: value.tolist() for name, value in weights.items()
    }


def test_saved_heads_have_the_public_names_and_load_back_equal(tmp_path: Path) -> None:
    weights = public_weights(4)
    save_medusa(load_head(MEDUSA, publish(tmp_path / "one", weights), "auto", CPU), tmp_path / "two")
    written = torch.load(tmp_path / "two" / "medusa_lm_head.pt", weights_only=True)
    assert set(written) == set(weights)
    assert all(torch.equal(written[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("2.1.weight", None, "2.1.weight is missing"),
        ("1.0.linear.bias", torch.zeros(3), r"1.0.linear.bias has shape \[3\] instead of \[4\]"),
        ("extra", torch.zeros(1), "extra is not known"),
        ("0.1.weight", None, r"0.1.weight must be \(V, D\)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, name: str, value: Tensor | None, message: str) -> None:
    weights = public_weights(3)
    weights.pop(name, None)
    if value is not None:
        weights[name] = value
    ref = publish(tmp_path / "heads", weights)
    for read in (lambda ref: read_shape(MEDUSA, ref), lambda ref: load_head(MEDUSA, ref, "auto", CPU)):
        with pytest.raises(CheckpointError, match=message):
            read(ref)


def test_a_file_without_heads_is_refused(tmp_path: Path) -> None:
    ref = publish(tmp_path / "heads", {"lm_head.weight": torch.zeros(2, 2)})
    with pytest.raises(CheckpointError, match="no Medusa head"):
        read_shape(MEDUSA, ref)
