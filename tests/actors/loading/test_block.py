"""Block drafters as `model.drafter`: checked against the target before any actor starts, loaded, and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from actors.loading import pair, slot_count
from configs.load import ConfigError, load_preset
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding.drafters import BlockDrafter
from tests import toys
from tests.conformance import block, checks

CPU = torch.device("cpu")


def save(folder: Path, family: str = "llava") -> None:
    """Write a block drafter in the format of DFlash."""
    network = block.network(family)
    layers = network.shape.layers.to_dict()
    config = {
        **{name: value for name, value in layers.items() if value is not None},
        "architectures": ["DFlashDraftModel"],
        "block_size": block.BLOCK_SIZE,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": block.MASK, "target_layer_ids": [layer - 1 for layer in block.LAYERS]},
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    toys.save("llava", root / "target")
    save(root / "block")
    return root


def job(folders: Path, drafter: Path | None = None, length: int = 4, **pool: Any) -> CaptionJobConfig:
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": "Describe it.",
        "model": {
            "target": {"path": str(folders / "target"), "dtype": "float32", "device": "cpu"},
            "drafter": {"path": str(drafter or folders / "block"), "dtype": "float32"},
        },
        "method": {"drafter": {"kind": "block"}, "tree": {"kind": "chain", "length": length}},
        "pool": {"max_context_tokens": 128, **pool},
        "sink": {"path": "out"},
    }
    return CaptionJobConfig.model_validate_json(json.dumps(data))


def test_a_loaded_pair_with_a_block_drafter_gives_the_targets_own_tokens(folders: Path) -> None:
    loaded = pair.load(job(folders))
    assert loaded.drafter_id == f"{folders / 'block'}@{loaded.info.revisions['drafter']}"
    wanted = checks.requests("llava", 6)
    engine = loaded.engine(3)
    done = checks.run(engine, wanted)
    for request in wanted:
        expected = checks.generated("llava", request, loaded.target.eos_ids)
        assert done[request.sample_id].token_ids == expected
    assert any(completion.telemetry.num_accepted_draft_tokens for completion in done.values())


def test_the_estimated_memory_of_a_slot_is_at_least_what_an_engine_allocates(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[slot_count.Sizes] = []
    bytes_of = slot_count.slot_bytes
    monkeypatch.setattr(slot_count, "slot_bytes", lambda *given: sizes.append(bytes_of(*given)) or sizes[-1])
    loaded = pair.load(job(folders))
    loaded.count_slots()
    engine = loaded.engine(4)
    checks.run(engine, checks.requests("llava", 3))
    inner: Any = engine.method.drafter
    assert isinstance(inner.inner, BlockDrafter)
    memories = [tensor for lanes in (engine._lanes, inner.lanes) for tensor in (*lanes.cache.keys, *lanes.cache.values)]
    held = sum(tensor.numel() * tensor.element_size() for tensor in memories)
    assert held / 4 <= sizes[0][CPU]
    # A drafter's scratch is sized for the widest catch-up of a controller, and this engine has none.
    assert sizes[0][CPU] < 2.5 * held / 4


def changed(folders: Path, tmp_path: Path, **fields: Any) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(folders / "block", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_a_drafter_for_another_target_is_refused_before_weights_of_the_target_are_read(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.target.Target.load", lambda *_: pytest.fail("weights of the target were read"))
    config = {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}}
    with pytest.raises(ConfigError, match=r"^model\.drafter: .* was trained for Qwen3ForCausalLM, and the target is L"):
        pair.check(job(folders, changed(folders, tmp_path, **config)))
    shutil.rmtree(tmp_path / "changed")
    with pytest.raises(ConfigError, match=r"^model\.drafter: .*num_target_layers is 3, and the target has 2 layers"):
        pair.check(job(folders, changed(folders, tmp_path, num_target_layers=3)))
    shutil.rmtree(tmp_path / "changed")
    with pytest.raises(ConfigError, match=r"^model\.drafter: .* has a vocabulary of 65 tokens, and the target of 64"):
        pair.check(job(folders, changed(folders, tmp_path, vocab_size=65)))
    shutil.rmtree(tmp_path / "changed")
    drafter = changed(folders, tmp_path, vocab_size=60, dflash_config={"mask_token_id": 5, "target_layer_ids": [0, 1]})
    with pytest.raises(ConfigError, match=r"^model\.drafter: .* knows 60 tokens, and 4 of the target's words lie"):
        pair.check(job(folders, drafter))


def test_states_of_another_width_are_refused(folders: Path, tmp_path: Path) -> None:
    recorded = Path(__file__).parents[2] / "models/heads/recorded/dflash"
    shutil.copytree(folders / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    config["text_config"] |= {"hidden_size": 64, "num_hidden_layers": 6}
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"reads states of width 32, and the target's are 64 wide"):
        pair.check(job(tmp_path, recorded))


def test_damaged_weights_are_refused_before_any_actor_starts(folders: Path, tmp_path: Path) -> None:
    folder = changed(folders, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][2] = torch.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"^model\.drafter: .*norm\.weight has values that are not finite"):
        pair.check(job(folders, folder))


def test_a_tree_deeper_than_a_block_is_refused(folders: Path) -> None:
    pair.check(job(folders, length=4))
    with pytest.raises(ConfigError, match=r"^method\.tree: it drafts 5 levels deep, and a block .* has 4 drafts"):
        pair.check(job(folders, length=5))


def test_another_device_than_the_targets_is_refused(folders: Path) -> None:
    data = json.loads(job(folders).model_dump_json())
    data["model"]["drafter"]["device"] = "cuda"
    with pytest.raises(ConfigError, match=r"^model\.drafter\.device: a head runs where its target does"):
        pair.load(CaptionJobConfig.model_validate_json(json.dumps(data)))


def test_an_image_target_takes_no_block_drafter() -> None:
    with pytest.raises((ConfigError, ValidationError), match=r"method\.drafter 'block' drafts texts"):
        load_preset(SynthesizeJobConfig, "zoo_images_medusa", ["method.drafter.kind=block"])
