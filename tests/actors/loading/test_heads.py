"""Heads as `model.drafter`: checked against the target without weights, loaded, and run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.loading import pair
from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from decoding.drafters import EagleDrafter, MedusaDrafter, ParallelEagleDrafter
from models.backends.select import is_on
from models.heads.eagle3 import Eagle3Network
from models.heads.medusa import MedusaHeads, MedusaShape
from models.heads.training.eagle3_loss import fresh_eagle3
from models.heads.training.losses import fresh_eagle
from models.heads.writer import save_eagle, save_eagle3, save_medusa
from tests import toys
from tests.conformance import checks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target, an EAGLE head and four Medusa heads for it."""
    root = tmp_path_factory.mktemp("pair")
    toys.save("llava", root / "target")
    save_eagle(fresh_eagle(toys.target("llava"), 0).network, root / "eagle")
    torch.manual_seed(0)
    save_medusa(MedusaHeads(MedusaShape(4, 1, 32, toys.VOCAB_SIZE)), root / "medusa")
    save_third(root / "eagle3", (type(toys.oracle("llava")).__name__,))
    save_parallel(root / "peagle", (type(toys.oracle("llava")).__name__,))
    return root


def save_third(folder: Path, architectures: tuple[str, ...], **shape: Any) -> None:
    """Write an EAGLE-3 head for the toy target, or one of another `shape`."""
    network = fresh_eagle3(toys.target("llava"), 0, feature_layers=(0, 1)).network
    if shape:
        network = Eagle3Network(replace(network.shape, **shape))
    save_eagle3(network, folder, "toy", architectures, 5)


def save_parallel(folder: Path, architectures: tuple[str, ...]) -> None:
    """Write a P-EAGLE head for the toy target: an EAGLE-3 head with a mask."""
    save_third(folder, architectures)
    config = json.loads((folder / "config.json").read_text()) | {"speculators_model_type": "peagle", "mask_token_id": 6}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    mask = torch.randn(1, 1, weights["fc.weight"].shape[1], generator=torch.Generator().manual_seed(0))
    save_file(weights | {"mask_hidden": mask}, folder / "model.safetensors")


def job(folders: Path, kind: str, head: str | None = None) -> CaptionJobConfig:
    return CaptionJobConfig.model_validate(
        {
            "source": {"kind": "images", "path": "in"},
            "prompt": "Describe it.",
            "model": {
                "target": {"path": str(folders / "target"), "dtype": "float32", "device": "cpu"},
                "drafter": {"path": str(folders / (head or kind)), "dtype": "float32"},
            },
            "method": {
                "drafter": {"kind": kind},
                "tree": {"kind": "dynamic", "top_k": 3, "depth": 2, "total_tokens": 9},
            },
            "sink": {"path": "out"},
        }
    )


@pytest.mark.parametrize(
    ("kind", "head", "drafter"),
    [
        ("eagle", "eagle", EagleDrafter),
        ("eagle3", "eagle3", EagleDrafter),
        ("eagle3", "peagle", ParallelEagleDrafter),
        ("medusa", "medusa", MedusaDrafter),
    ],
)
def test_a_loaded_pair_with_a_head_gives_the_targets_own_tokens(
    folders: Path, kind: str, head: str, drafter: type
) -> None:
    loaded = pair.load(job(folders, kind, head))
    assert type(loaded.engine(1).method.drafter.inner) is drafter  # type: ignore[attr-defined]
    assert loaded.drafter_id == f"{folders / head}@{loaded.info.revisions['drafter']}"
    wanted = checks.requests("llava", 5)
    done = checks.run(loaded.engine(3), wanted)
    for request in wanted:
        expected = checks.generated("llava", request, loaded.target.eos_ids)
        assert done[request.sample_id].token_ids == expected
        assert done[request.sample_id].telemetry.num_draft_tokens > 0


def test_the_revision_follows_the_weights(folders: Path, tmp_path: Path) -> None:
    save_eagle(fresh_eagle(toys.target("llava"), 1).network, tmp_path / "eagle")
    (tmp_path / "target").symlink_to(folders / "target")
    first, other = (pair.check(job(root, "eagle")).revisions for root in (folders, tmp_path))
    assert first["target"] == other["target"]
    assert first["drafter"] != other["drafter"]


def wide(folder: Path) -> None:
    network = fresh_eagle(toys.target("llava"), 0).network
    shape = network.shape
    data = {
        "vocab_size": network.vocab_size,
        "hidden_size": 2 * network.hidden_size,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    save_eagle(type(network)(type(shape).of(data, "test")), folder)


def short(folder: Path) -> None:
    data = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    shape = fresh_eagle(toys.target("llava"), 0).network.shape
    save_eagle(type(fresh_eagle(toys.target("llava"), 0).network)(type(shape).of(data, "test")), folder)


@pytest.mark.parametrize(
    ("kind", "write", "message"),
    [
        ("eagle", wide, "reads states of width 64, and the target's are 32 wide"),
        ("eagle", short, "knows 40 tokens, and 24 of the target's words lie beyond, e.g. id 40"),
        (
            "medusa",
            lambda folder: save_medusa(MedusaHeads(MedusaShape(2, 1, 32, toys.VOCAB_SIZE)), folder),
            "3 levels deep, and model.drafter has 2 Medusa heads",
        ),
        (
            "medusa",
            lambda folder: save_medusa(MedusaHeads(MedusaShape(5, 1, 16, toys.VOCAB_SIZE)), folder),
            "reads states of width 16",
        ),
        ("eagle", lambda folder: save_medusa(MedusaHeads(MedusaShape(1, 1, 4, 4)), folder), "must give vocab_size"),
        ("medusa", wide, "no Medusa head"),
        ("eagle3", wide, "describes no EAGLE-3 head"),
        (
            "eagle3",
            lambda folder: save_third(folder, (), target_hidden_size=16),
            "reads states of width 16, and the target's are 32 wide",
        ),
        (
            "eagle3",
            lambda folder: save_third(folder, ("Qwen3ForCausalLM",)),
            "was trained for Qwen3ForCausalLM, and the target is Llava",
        ),
        (
            "eagle3",
            lambda folder: save_third(folder, (), feature_layers=(1, 7)),
            "names the target's state 7, and the target has 2 layers",
        ),
        ("eagle", lambda folder: save_third(folder, ()), "EAGLE-1/2|config.json: it must give"),
    ],
)
def test_a_head_for_another_target_is_refused_before_anything_starts(
    folders: Path, tmp_path: Path, kind: str, write: Any, message: str
) -> None:
    (tmp_path / "target").symlink_to(folders / "target")
    write(tmp_path / "other")
    with pytest.raises(ConfigError, match=message):
        pair.check(job(tmp_path, kind, "other"))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"drafter": {"kind": "eagle"}, "contexts": [{"kind": "text_only"}]}, "no prompt of its own"),
        ({"tree": {"kind": "dynamic", "top_k": 2, "depth": 1, "total_tokens": 8}}, "more than the 7 nodes"),
        ({"tree": {"kind": "dynamic", "top_k": 0}}, "greater than or equal to 1"),
    ],
)
def test_illegal_choices_are_refused_by_the_schema(folders: Path, method: dict[str, Any], message: str) -> None:
    data = job(folders, "eagle").model_dump(mode="json")
    data["method"] = method
    # As JSON, because the schema accepts lists for tuples only there.
    with pytest.raises(ValueError, match=message):
        CaptionJobConfig.model_validate_json(json.dumps(data))


def test_a_head_needs_a_checkpoint(folders: Path) -> None:
    data = job(folders, "medusa").model_dump()
    data["model"]["drafter"] = None
    with pytest.raises(ValueError, match=r"'medusa', so model\.drafter must name a checkpoint"):
        CaptionJobConfig.model_validate(data)


@pytest.mark.parametrize(
    ("configured", "device", "expected"),
    [
        *[("auto", "cuda:1", True), ("cuda", "cuda:1", True), ("cuda:1", "cuda:1", True), ("cpu", "cpu", True)],
        *[("cuda:0", "cuda:1", False), ("cpu", "cuda:1", False), ("cuda", "cpu", False)],
    ],
)
def test_a_device_without_a_number_is_any_of_its_type(configured: str, device: str, expected: bool) -> None:
    assert is_on(configured, torch.device(device)) == expected
