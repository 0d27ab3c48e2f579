"""Errors in the weights of an image pair are refused with the dotted path of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.loading import slot_count
from actors.loading.image_pair import load, load_painter
from actors.loading.slot_count import position_bytes
from configs.load import ConfigError, validate
from configs.synthesis import SynthesizeJobConfig
from models.heads.eagle import EagleNetwork
from models.llamagen.vq_files import save_vq
from tests.toys.image_checkpoints import ImageFolders, vq_model, write_checkpoints


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def job(folders: ImageFolders, vq: Path) -> SynthesizeJobConfig:
    model = {"target": folders.text, "drafter": folders.drafters["eagle"], "vq": vq, "condition": folders.t5}
    data = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": "{caption}",
        "model": {name: {"path": str(path), "device": "cpu"} for name, path in model.items()},
        "method": {
            "drafter": {"kind": "eagle"},
            "tree": {"kind": "chain", "length": 2},
            "acceptance": {"kind": "lantern", "k": 10},
        },
        "sink": {"path": "out"},
    }
    return validate(SynthesizeJobConfig, data, "job.yaml")


def test_a_codebook_that_is_not_finite_is_refused_where_neighbours_are_looked_up(
    folders: ImageFolders, tmp_path: Path
) -> None:
    vq = vq_model()
    with torch.no_grad():
        vq.codebook[3, 0] = torch.nan
    save_vq(vq, tmp_path / "vq")
    with pytest.raises(ConfigError, match=r"^model\.vq: the codebook holds numbers that are not finite$"):
        load(job(folders, tmp_path / "vq")).engine(1)
    assert load(job(folders, folders.vq)).engine(1).max_context_tokens > 0


def test_weights_that_are_torn_behind_their_header_are_refused(folders: ImageFolders, tmp_path: Path) -> None:
    save_vq(vq_model(), tmp_path / "vq")
    file = tmp_path / "vq/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"^model\.vq: .*model\.safetensors: it cannot be read"):
        load_painter(job(folders, tmp_path / "vq"))


def test_slots_of_images_are_reckoned_with_both_lanes_of_both_models(
    folders: ImageFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = load(job(folders, folders.vq))
    engine = pair.engine(2)
    target, drafter = pair.target, pair.drafter
    assert isinstance(drafter, EagleNetwork)
    columns = [
        next(iter(position_bytes(*item).values()))
        for item in ((target.decoder, target.hidden_size), (drafter, drafter.hidden_size))
    ]
    # A chain of 2 has three nodes; the head needs scratch positions for its widest catch-up.
    num_positions = 2 * (engine.max_context_tokens + 3 + 1), 2 * (engine.max_context_tokens + 128 + 3)
    logits = 6 * 3 * 2 * target.vocab_size * 4
    each = num_positions[0] * columns[0] + num_positions[1] * columns[1] + logits
    monkeypatch.setattr(slot_count, "usable_bytes", lambda *_: 9 * each + each // 2)
    slots, reason = pair.count_slots()
    assert slots == 9
    assert f"for {each / 2**20:,.1f} MiB each" in reason
