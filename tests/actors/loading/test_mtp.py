"""The MTP layer of the target's own checkpoint: loaded and run from `model.target.path` alone, refused or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.loading import pair
from actors.loading.method import build_method
from actors.loading.slot_count import slot_bytes
from configs.load import ConfigError, validate
from configs.presets import named_method
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.drafters import MtpDrafter
from models.heads.mtp import MtpNetwork
from models.heads.mtp_files import save_with_mtp
from models.loading.checkpoints import CheckpointRef
from models.loading.vocabulary import SlicedHead
from tests import toys
from tests.conformance import checks, mtp

MTP = {"drafter": {"kind": "mtp"}, "tree": {"kind": "chain", "length": 3}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy without an MTP layer, and a copy with one."""
    root = tmp_path_factory.mktemp("targets")
    toys.save("qwen3_vl", root / "plain")
    state = mtp.network("qwen3_vl").state_dict()
    save_with_mtp(CheckpointRef(str(root / "plain")), state, "qwen3_vl_text", 2, root / "whole")
    return root


def job(target: Path, method: dict[str, Any]) -> CaptionJobConfig:
    return validate(
        CaptionJobConfig,
        {
            "source": {"kind": "images", "path": "in"},
            "prompt": "Describe it.",
            "model": {"target": {"path": str(target), "dtype": "float32", "device": "cpu"}},
            "method": method,
            "pool": {"compile": "never", "capture": "never", "slots": 4, "max_context_tokens": 128},
            "sink": {"path": "out"},
        },
        "job.yaml",
    )


def test_a_target_with_a_layer_drafts_without_another_checkpoint(folders: Path) -> None:
    config = job(folders / "whole", MTP)
    assert pair.check(config).has_mtp
    assert pair.check(config).drafter_id == ""
    loaded = pair.load(config)
    engine = loaded.engine(4)
    assert isinstance(loaded.target.mtp, MtpNetwork)
    wanted = checks.requests("qwen3_vl", 5)
    done = checks.run(engine, wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == checks.generated("qwen3_vl", request, loaded.target.eos_ids)
    assert sum(each.telemetry.num_accepted_draft_tokens for each in done.values()) > 0


def test_a_draft_vocabulary_slices_the_output_layer(folders: Path) -> None:
    config = job(folders / "whole", {**MTP, "drafter": {"kind": "mtp", "vocabulary": {"size": 20}}})
    loaded = pair.load(config)
    drafter = build_method(config.method, None, loaded.target).drafter
    assert isinstance(drafter, MtpDrafter)
    assert isinstance(drafter.head, SlicedHead)


def test_a_target_without_a_layer_is_refused_before_weights_are_read(folders: Path) -> None:
    problem = r"model\.target: .*plain: it has no MTP layer: none of its tensors is mtp\.fc\.weight"
    with pytest.raises(ConfigError, match=problem):
        pair.check(job(folders / "plain", MTP))


def test_trials_leave_a_layer_out_that_the_target_lacks(folders: Path) -> None:
    auto = named_method("auto", "test")
    whole, plain = job(folders / "whole", auto), job(folders / "plain", auto)
    assert [each.label for each in whole.method.methods] == ["plain", "mtp", "suffix"]
    assert pair.check(whole).has_mtp is True
    assert pair.check(plain).has_mtp is False
    for config, labels in ((whole, ["plain", "mtp", "suffix"]), (plain, ["plain", "suffix"])):
        loaded = pair.load(config)
        assert [each.label for each in loaded.available(config.method).methods] == labels
        assert loaded.count_slots()[0] >= 1


def test_no_layer_is_read_for_other_methods(folders: Path) -> None:
    config = job(folders / "whole", {"drafter": {"kind": "suffix"}})
    assert pair.check(config).has_mtp is None
    assert pair.load(config).target.mtp is None


def test_slots_count_the_kv_cache_of_the_layer(folders: Path) -> None:
    config = job(folders / "whole", MTP)
    target = pair.load(config).target
    with_mtp = slot_bytes(config.method, target, {}, {}, 100)
    plain = slot_bytes(job(folders / "whole", {"tree": MTP["tree"]}).method, target, {}, {}, 100)
    text: Any = target.decoder.config
    position = 2 * text.num_key_value_heads * text.head_dim * 4
    cpu = torch.device("cpu")
    assert with_mtp[cpu] - plain[cpu] >= 100 * position


def test_targets_that_write_images_have_none() -> None:
    with pytest.raises(ValueError, match="models that write images have no MTP layers"):
        SynthesizeJobConfig.model_validate(
            {
                "source": {"kind": "parquet", "path": "in"},
                "columns": {"label": "label"},
                "model": {"target": {"path": "some/model"}},
                "method": MTP,
                "sink": {"path": "out"},
            }
        )
