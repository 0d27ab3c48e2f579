"""ViSpec and MSD heads as `model.drafter`: loaded and run, and refused if they do not fit the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.loading import image_pair, pair
from actors.loading.method import build_method
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.drafters import EagleDrafter
from models.heads.eagle import EagleNetwork
from models.heads.files import write_checkpoint
from models.heads.training.losses import fresh_eagle
from models.heads.vision import MsdNetwork, VispecNetwork
from models.loading.vocabulary import SlicedHead
from tests import toys
from tests.conformance import checks, vision_heads
from tests.toys.image_checkpoints import write_checkpoints

FAMILIES = ("llava", "qwen2_5_vl")
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "rope_parameters", "max_position_embeddings"),
)


def write(folder: Path, network: EagleNetwork, model_type: str, **changes: Any) -> None:
    """Write a head in the layout of the public code; `changes` are for the tensors."""
    config = {name: getattr(network.shape.layers, name) for name in FIELDS}
    config |= {"model_type": model_type, "qkv_bias": network.shape.qkv_bias}
    write_checkpoint(folder, config, network.state_dict() | changes, None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy targets, each with a ViSpec and an MSD head."""
    root = tmp_path_factory.mktemp("pairs")
    for family in FAMILIES:
        toys.save(family, root / family / "target")
        network = fresh_eagle(toys.target(family), 0).network
        write(root / family / "vispec", vision_heads.vispec(network), family)
        msd = vision_heads.msd if family == "llava" else vision_heads.qwen_msd
        write(root / family / "msd", msd(network), family)
    return root


def job(target: Path, drafter: Path, kind: str, **drafting: Any) -> CaptionJobConfig:
    return CaptionJobConfig.model_validate(
        {
            "source": {"kind": "images", "path": "in"},
            "prompt": "Describe it.",
            "model": {
                "target": {"path": str(target), "dtype": "float32", "device": "cpu"},
                "drafter": {"path": str(drafter), "dtype": "float32"},
            },
            "method": {
                "drafter": {"kind": kind, **drafting},
                "tree": {"kind": "dynamic", "top_k": 3, "depth": 2, "total_tokens": 9},
            },
            "sink": {"path": "out"},
        }
    )


@pytest.mark.parametrize("kind", ["vispec", "msd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_pair_gives_the_targets_own_tokens(folders: Path, family: str, kind: str) -> None:
    loaded = pair.load(job(folders / family / "target", folders / family / kind, kind))
    assert type(loaded.drafter) is {"vispec": VispecNetwork, "msd": MsdNetwork}[kind]
    wanted = checks.requests(family, 5)
    done = checks.run(loaded.engine(3), wanted)
    for request in wanted:
        expected = checks.generated(family, request, loaded.target.eos_ids)
        assert done[request.sample_id].token_ids == expected
        assert done[request.sample_id].telemetry.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["vispec", "msd"])
def test_a_draft_vocabulary_slices_the_targets_output_layer(folders: Path, kind: str) -> None:
    root = folders / "llava"
    loaded = pair.load(job(root / "target", root / kind, kind, vocabulary={"size": 30}))
    assert isinstance(loaded.drafter, EagleNetwork)
    drafter = build_method(loaded.config.method, loaded.drafter, loaded.target).drafter
    assert isinstance(drafter, EagleDrafter)
    assert isinstance(drafter.head, SlicedHead)


def llava() -> EagleNetwork:
    return fresh_eagle(toys.target("llava"), 0).network


@pytest.mark.parametrize(
    ("kind", "make", "message"),
    [
        (
            "vispec",
            lambda folder: write(folder, vision_heads.vispec(llava()), "qwen2_5_vl"),
            "was trained for qwen2_5_vl, and the target is llava; take a head that was trained for this target",
        ),
        (
            "msd",
            lambda folder: write(folder, vision_heads.qwen_msd(llava()), "qwen2_vl"),
            "was trained for qwen2_vl, and the target is llava",
        ),
        ("msd", lambda folder: write(folder, vision_heads.msd(llava()), "llama"), "gives model_type 'llama'"),
        (
            "vispec",
            lambda folder: write(folder, vision_heads.resized(hidden_size=64), "llava"),
            "reads states of width 64, and the target's are 32 wide",
        ),
        (
            "vispec",
            lambda folder: write(folder, vision_heads.resized(vocab_size=40), "llava_next"),
            "knows 40 tokens, and 24 of the target's words lie beyond, e.g. id 40",
        ),
        (
            "msd",
            lambda folder: write(
                folder, vision_heads.msd(llava()), "llava", **{"fc.bias": torch.full((32,), torch.nan)}
            ),
            "fc.bias has values that are not finite",
        ),
        ("msd", lambda folder: write(folder, vision_heads.vispec(llava()), "llava"), "kind to vispec"),
        ("eagle", lambda folder: write(folder, vision_heads.vispec(llava()), "llava"), "kind to vispec"),
        ("vispec", lambda folder: write(folder, vision_heads.msd(llava()), "llava"), "no imadpt.q"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_anything_starts(
    folders: Path, tmp_path: Path, kind: str, make: Any, message: str
) -> None:
    make(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^model\.drafter: ") as raised:
        pair.check(job(folders / "llava" / "target", tmp_path / "other", kind))
    assert message in str(raised.value)


@pytest.mark.parametrize("kind", ["vispec", "msd"])
def test_a_target_that_writes_images_is_refused(tmp_path: Path, kind: str) -> None:
    folders = write_checkpoints(tmp_path)
    model = {"target": folders.text, "drafter": folders.drafters["eagle"], "vq": folders.vq, "condition": folders.t5}
    data = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": "{caption}",
        "model": {name: {"path": str(path), "device": "cpu"} for name, path in model.items()},
        "method": {"drafter": {"kind": kind}, "tree": {"kind": "chain", "length": 2}},
        "sink": {"path": "out"},
    }
    with pytest.raises(ConfigError, match=rf"^method\.drafter\.kind: {kind} heads are for models that read images"):
        image_pair.check(validate(SynthesizeJobConfig, data, "job.yaml"))


def test_other_contexts_and_a_missing_checkpoint_are_refused_by_the_schema(folders: Path) -> None:
    data = job(folders / "llava" / "target", folders / "llava" / "vispec", "vispec").model_dump(mode="json")
    with pytest.raises(ValueError, match="'vispec' has no prompt of its own to change"):
        CaptionJobConfig.model_validate_json(
            json.dumps(data | {"method": data["method"] | {"contexts": [{"kind": "pooled"}]}})
        )
    data["model"]["drafter"] = None
    with pytest.raises(ValueError, match=r"'vispec', so model\.drafter must name a checkpoint"):
        CaptionJobConfig.model_validate_json(json.dumps(data))
