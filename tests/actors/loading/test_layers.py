"""Self-speculation over loaded targets: layers are checked before any weights are read, and the pair runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.loading import image_pair, pair
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from tests import toys
from tests.conformance import checks
from tests.toys.image_checkpoints import ImageFolders, write_checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("target")
    toys.save("qwen3_vl", root)
    return root


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> ImageFolders:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


def job(folder: Path, layers: Any, **section: Any) -> CaptionJobConfig:
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": "Describe it.",
        "model": {"target": {"path": str(folder), "dtype": "float32", "device": "cpu"}},
        "method": {"drafter": {"kind": "layer_skip", "layers": layers, **section}},
        "sink": {"path": "out"},
    }
    return CaptionJobConfig.model_validate_json(json.dumps(data))


def image_job(folders: ImageFolders, layers: Any) -> SynthesizeJobConfig:
    data = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": "{caption}",
        "model": {
            "target": {"path": str(folders.text), "device": "cpu"},
            "condition": {"path": str(folders.t5), "device": "cpu"},
        },
        "method": {"drafter": {"kind": "layer_skip", "layers": layers}},
        "sink": {"path": "out", "images": False},
    }
    return validate(SynthesizeJobConfig, data, "job.yaml")


REFUSED = [
    (2, r"it names all 2 layers of .*, so that a draft would cost as much as the target; name fewer$"),
    ([0, 1], r"it names all 2 layers of .*; name fewer$"),
    (3, r"it names the first 3 layers, and .* has 2 layers, 0 to 1; name fewer than all of them$"),
    ([0, 2], r"it names layer 2, and .* has 2 layers, 0 to 1; name fewer than all of them$"),
]


@pytest.mark.parametrize(("layers", "reason"), REFUSED)
def test_layers_that_the_target_lacks_are_refused_without_reading_weights(
    folder: Path, folders: ImageFolders, layers: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("models.target.Target.load", "actors.loading.image_pair.load_gpt_target"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"^method\.drafter\.layers: " + reason):
        pair.check(job(folder, layers))
    with pytest.raises(ConfigError, match=r"^method\.drafter\.layers: " + reason):
        image_pair.check(image_job(folders, layers))


def test_a_candidate_is_named_by_its_index(folder: Path) -> None:
    data = json.loads(job(folder, 1).model_dump_json())
    candidates = [{"name": "short", "drafter": {"kind": "layer_skip", "layers": n}} for n in (1, 5)]
    candidates[1]["name"] = "long"
    data["method"] = {"auto": {"candidates": candidates}}
    with pytest.raises(ConfigError, match=r"^method\.auto\.candidates\.1\.drafter\.layers: it names the first 5"):
        pair.check(CaptionJobConfig.model_validate_json(json.dumps(data)))


@pytest.mark.parametrize("section", [{}, {"vocabulary": {"size": 40}}], ids=["all", "vocabulary"])
def test_a_loaded_target_drafts_for_itself(folder: Path, section: dict[str, Any]) -> None:
    loaded = pair.load(job(folder, [1], **section))
    assert loaded.drafter_id == ""
    assert loaded.drafter is None
    wanted = checks.requests("qwen3_vl", 5)
    done = checks.run(loaded.engine(3), wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("qwen3_vl", request, loaded.target.eos_ids)
        assert done[request.sample_id].telemetry.num_draft_tokens > 0


def test_a_loaded_image_target_drafts_for_itself_on_both_lanes(folders: ImageFolders) -> None:
    loaded = image_pair.load(image_job(folders, 1))
    engine = loaded.engine(2)
    assert engine.target.num_lanes == 2
    assert engine.method.drafter.merge.__class__.__name__ == "Guided"  # type: ignore[attr-defined]
