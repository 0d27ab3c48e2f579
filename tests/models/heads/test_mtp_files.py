"""MTP layers in checkpoints: read by the keys of their families, written under those that vLLM reads, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from models.heads.mtp import load_mtp, mtp_network
from models.heads.mtp_files import (
    INDEX,
    MtpMissing,
    check_mtp,
    find_layout,
    read_mtp,
    save_with_mtp,
    split_experts,
    stack_experts,
)
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target
from tests import toys
from tests.conformance import mtp

NUM_LAYERS = {"deepseek_v3": 3, "glm4_moe": 3, "qwen3_vl": 2, "llama": 2}
PUBLISHED = {
    "deepseek_v3": {
        "eh_proj.weight": "model.layers.3.eh_proj.weight",
        "enorm.weight": "model.layers.3.enorm.weight",
        "hnorm.weight": "model.layers.3.hnorm.weight",
        "post_norm.weight": "model.layers.3.shared_head.norm.weight",
        "mtp_block.self_attn.kv_a_proj_with_mqa.weight": "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
        "mtp_block.mlp.gate.e_score_correction_bias": "model.layers.3.mlp.gate.e_score_correction_bias",
        "mtp_block.mlp.shared_experts.up_proj.weight": "model.layers.3.mlp.shared_experts.up_proj.weight",
    },
    "qwen3_vl": {
        "eh_proj.weight": "mtp.fc.weight",
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "post_norm.weight": "mtp.norm.weight",
        "mtp_block.self_attn.q_proj.weight": "mtp.layers.0.self_attn.q_proj.weight",
        "mtp_block.self_attn.q_norm.weight": "mtp.layers.0.self_attn.q_norm.weight",
        "mtp_block.mlp.down_proj.weight": "mtp.layers.0.mlp.down_proj.weight",
        "mtp_block.input_layernorm.weight": "mtp.layers.0.input_layernorm.weight",
    },
}


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    with mtp.mixtures():
        yield


def drawn(family: str) -> dict[str, Tensor]:
    """Random tensors of an MTP layer for a toy."""
    generator = torch.Generator().manual_seed(7)
    state = mtp_network(toys.target(family).decoder, family).state_dict()
    return {name: torch.randn(value.shape, generator=generator) for name, value in state.items()}


def written(family: str, folder: Path) -> tuple[CheckpointRef, dict[str, Tensor]]:
    """A checkpoint of a toy with an MTP layer, and the layer's tensors."""
    tensors, plain = drawn(family), folder / "plain"
    toys.save(family, plain)
    config: Any = toys.target(family).decoder.config
    save_with_mtp(CheckpointRef(str(plain)), tensors, config.model_type, config.num_hidden_layers, folder / "whole")
    return CheckpointRef(str(folder / "whole")), tensors


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_vl"])
def test_a_written_layer_has_the_published_names_and_is_read_again(family: str, tmp_path: Path) -> None:
    ref, tensors = written(family, tmp_path)
    index = json.loads((Path(ref.path) / INDEX).read_text())["weight_map"]
    assert set(index.values()) == {path.name for path in Path(ref.path).glob("*.safetensors")}
    stored = load_file(Path(ref.path) / index[PUBLISHED[family]["eh_proj.weight"]])
    for name, key in PUBLISHED[family].items():
        assert torch.equal(stored[key], tensors[name]), name
    if family == "deepseek_v3":
        for number in range(8):
            gate = stored[f"model.layers.3.mlp.experts.{number}.gate_proj.weight"]
            up = stored[f"model.layers.3.mlp.experts.{number}.up_proj.weight"]
            assert torch.equal(torch.cat([gate, up]), tensors["mtp_block.mlp.experts.gate_up_proj"][number])
    read = read_mtp(ref, NUM_LAYERS[family])
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    config = json.loads((Path(ref.path) / "config.json").read_text())
    if family == "deepseek_v3":
        assert config["num_nextn_predict_layers"] == 1
    else:
        assert config["text_config"]["mtp_num_hidden_layers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", list(NUM_LAYERS))
def test_a_target_with_a_written_layer_loads_as_before(family: str, tmp_path: Path) -> None:
    ref, tensors = written(family, tmp_path)
    target = Target.load(ref, "float32", "cpu")
    expected = toys.oracle(family).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in target.model.state_dict().items())
    network = load_mtp(target.decoder, read_mtp(ref, NUM_LAYERS[family]), ref.path)
    assert all(torch.equal(value, tensors[name]) for name, value in network.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_the_same_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patterns name layer numbers of the published sizes only."""
    ref, tensors = written(family, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(ref.path)
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    state = MtpModel.from_pretrained(model).layers[0].state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(value, tensors[name]) for name, value in state.items())


def test_layers_inside_the_language_model_of_a_vision_model_are_found() -> None:
    prefix = "model.language_model.layers.5."
    parts = ["eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "self_attn.q_proj.weight"]
    layout = find_layout("some/model", [f"{prefix}{part}" for part in (*parts, "embed_tokens.weight")], 5)
    assert sorted(layout.named([f"{prefix}{part}" for part in (*parts, "embed_tokens.weight")]).values()) == [
        *("eh_proj.weight", "enorm.weight", "hnorm.weight", "mtp_block.self_attn.q_proj.weight", "post_norm.weight")
    ]


def test_a_checkpoint_without_a_layer_is_refused_with_the_keys_that_it_lacks(tmp_path: Path) -> None:
    toys.save("llama", tmp_path)
    keys = r"none of its tensors is mtp\.fc\.weight or model\.layers\.2\.eh_proj\.weight"
    with pytest.raises(MtpMissing, match=keys):
        check_mtp(CheckpointRef(str(tmp_path)), 2)


@pytest.mark.parametrize(
    ("dropped", "missing"),
    [
        ("mtp.fc.weight", r"it lacks mtp\.fc\.weight$"),
        ("mtp.norm.weight", r"it lacks mtp\.norm\.weight$"),
        ("mtp.layers.0.", r"it lacks mtp\.layers\.0\.\*$"),
    ],
)
def test_an_incomplete_layer_is_refused_by_its_headers(dropped: str, missing: str, tmp_path: Path) -> None:
    change(tmp_path, lambda tensors: {name: v for name, v in tensors.items() if not name.startswith(dropped)})
    with pytest.raises(CheckpointError, match=missing):
        check_mtp(CheckpointRef(str(tmp_path / "whole")), 2)


def change(folder: Path, alter: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> CheckpointRef:
    """A Llama toy whose MTP layer's tensors are altered."""
    ref, _ = written("llama", folder)
    shard = Path(ref.path) / "model-00002-of-00002.safetensors"
    save_file(alter(load_file(shard)), shard, metadata={"format": "pt"})
    return ref


@pytest.mark.parametrize(
    ("alter", "problem"),
    [
        (lambda t: {**t, "mtp.fc.weight": t["mtp.fc.weight"][:, :7].clone()}, r"eh_proj.weight has shape \[32, 7\]"),
        (lambda t: {**t, "mtp.layers.0.extra": torch.zeros(1)}, "mtp_block.extra is not known"),
        (lambda t: {**t, "mtp.norm.weight": t["mtp.norm.weight"] * torch.nan}, "post_norm.weight has values"),
        (lambda t: {n: v for n, v in t.items() if "q_proj" not in n}, "mtp_block.self_attn.q_proj.weight is missing"),
    ],
)
def test_a_damaged_layer_is_refused(
    alter: Callable[[dict[str, Tensor]], dict[str, Tensor]], problem: str, tmp_path: Path
) -> None:
    ref = change(tmp_path, alter)
    with pytest.raises(CheckpointError, match=problem):
        load_mtp(toys.target("llama").decoder, read_mtp(ref, 2), ref.path)


def test_keys_of_a_model_of_the_hub_are_those_of_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings are downloaded without weights."""
    ref, _ = written("llama", tmp_path)
    for file in Path(ref.path).glob("*.safetensors"):
        file.unlink()
    monkeypatch.setattr("models.heads.mtp_files.fetch_settings", lambda *_, **__: Path(ref.path))
    layout = check_mtp(CheckpointRef("some/model"), 2)
    assert layout is not None
    assert layout.prefix == "mtp."
    (Path(ref.path) / INDEX).unlink()
    assert check_mtp(CheckpointRef("some/model"), 2) is None


def test_a_checkpoint_of_several_files_gets_one_more(tmp_path: Path) -> None:
    toys.oracle("llama").save_pretrained(tmp_path / "plain", max_shard_size="20KB")  # type: ignore[operator]
    before = json.loads((tmp_path / "plain" / INDEX).read_text())["weight_map"]
    assert len(set(before.values())) > 1
    save_with_mtp(CheckpointRef(str(tmp_path / "plain")), drawn("llama"), "llama", 2, tmp_path / "whole")
    after = json.loads((tmp_path / "whole" / INDEX).read_text())["weight_map"]
    assert before.items() <= after.items()
    assert {after[key] for key in after.keys() - before.keys()} == {"model-mtp.safetensors"}
    assert read_mtp(CheckpointRef(str(tmp_path / "whole")), 2).keys() == drawn("llama").keys()


def test_a_second_layer_is_refused(tmp_path: Path) -> None:
    ref, tensors = written("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"it has an MTP layer already, at mtp\.\*"):
        save_with_mtp(ref, tensors, "llama", 2, tmp_path / "twice")


def test_experts_are_split_and_stacked() -> None:
    stacked = {"mlp.experts.gate_up_proj": torch.randn(3, 8, 5), "mlp.experts.down_proj": torch.randn(3, 5, 4)}
    split = split_experts(stacked)
    assert split["mlp.experts.2.up_proj.weight"].tolist() == stacked["mlp.experts.gate_up_proj"][2, 4:].tolist()
    again = stack_experts(split)
    assert all(torch.equal(again[name], value) for name, value in stacked.items())
    del split["mlp.experts.1.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts lack gate_proj, up_proj or down_proj"):
        stack_experts(split)


def test_pickled_weights_are_not_copied(tmp_path: Path) -> None:
    toys.save("llama", tmp_path / "plain")
    shutil.copyfile(tmp_path / "plain/model.safetensors", tmp_path / "plain/other.bin")
    save_with_mtp(CheckpointRef(str(tmp_path / "plain")), drawn("llama"), "llama", 2, tmp_path / "whole")
    assert not (tmp_path / "whole/other.bin").exists()
    assert (tmp_path / "whole/tokenizer.json").exists()
