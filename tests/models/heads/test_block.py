"""Block drafters: outputs equal those recorded from the public code; files that do not fit are refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.backends.attention import DecoderRunner
from models.heads.block import BlockNetwork, View
from models.heads.formats import BLOCK
from models.heads.loader import load_head, read_shape
from models.inputs.prefix import Prefix
from models.kv.lanes import LaneModel, SlotBatch
from models.loading.checkpoints import CheckpointError, CheckpointRef

RECORDED = Path(__file__).parent / "recorded"
CPU = torch.device("cpu")
NUM_TARGET_LAYERS, FIRST = 6, 9
"""Layers of the recorded target, and tokens before the first block; further features follow before the second."""
VOCAB = 64


def load(folder: Path) -> BlockNetwork:
    return load_head(BLOCK, CheckpointRef(str(folder)), "float32", CPU, NUM_TARGET_LAYERS)


def batch(num_generated: int) -> SlotBatch:
    return SlotBatch(torch.zeros(1, dtype=torch.long), (0,), (num_generated,))


@torch.no_grad()
@pytest.mark.parametrize("case", ["dflash", "dflash_speculators", "dflash_speculators_sliding"])
def test_two_blocks_equal_those_of_the_public_code(case: str) -> None:
    network = load(RECORDED / case)
    tensors = load_file(RECORDED / case / "recorded.safetensors")
    assert network.feature_layers == (2, 4, 5), "both formats name the same states of the target"
    projected = network.project(tensors["features"])
    torch.testing.assert_close(projected, tensors["context.projected"], atol=1e-5, rtol=1e-5)
    embedding: Any = torch.nn.Embedding(VOCAB, network.hidden_size)
    head = torch.nn.Linear(network.hidden_size, VOCAB, bias=False)
    if "target.embed_tokens" in tensors:
        embedding.weight.copy_(tensors["target.embed_tokens"])
    if "target.lm_head" in tensors:
        head.weight.copy_(tensors["target.lm_head"])
    embed, output = network.embedding(embedding), network.output_layer(head, VOCAB)
    lanes, size = LaneModel(network.context, output, 1, 1, 64), network.shape.block_size
    run, ids = DecoderRunner(network), torch.arange(FIRST)
    lanes.admit(batch(1), [[Prefix(ids, projected[:FIRST], ids, ids < 0)]])
    for name, start, end in (("first", FIRST, FIRST), ("second", FIRST, len(projected))):
        if more := end - start:
            positions = torch.arange(more)
            causal = (positions[:, None] >= positions)[None]
            lanes.forward_embeds(batch(1 + more), projected[None, start:end], positions[None], causal)
            lanes.commit(batch(1 + more), positions[None, :0], torch.tensor([more]))
        depth, everything = torch.arange(size)[None], torch.ones(1, size, size, dtype=torch.bool)
        inputs = embed(tensors[f"{name}.ids"])[None]
        hidden = lanes.forward_embeds(batch(1 + more), inputs, depth, everything, 0, run)[0, 0]
        torch.testing.assert_close(hidden, tensors[f"{name}.hidden"], atol=1e-4, rtol=1e-4)
        logits = output(hidden[1:])
        assert torch.equal(logits.argmax(-1), tensors[f"{name}.tokens"])
        torch.testing.assert_close(logits[:, network.token_ids], tensors[f"{name}.logits"], atol=1e-4, rtol=1e-4)
        assert bool((logits.isinf().sum(-1) == VOCAB - len(network.token_ids)).all())


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def configured(name: str, value: Any, inside: str | None = None) -> Change:
    def change(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        (config[inside] if inside else config)[name] = value

    return change


def without(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name, None) if name in tensors else config.pop(name)


def with_tensor(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, tensors: tensors.update({name: make(tensors[name])})


def spoiled(tensor: Tensor) -> Tensor:
    out = tensor.clone()
    out.flatten()[3] = torch.nan
    return out


DFLASH, SPECULATORS = "dflash", "dflash_speculators"
INSIDE = "transformer_layer_config"
FULL, SLIDING = "full_attention", "sliding_attention"
SLIDES = {"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True}
REFUSED: list[tuple[str, Change, str]] = [
    (DFLASH, without("dflash_config"), "it has neither dflash_config nor speculators_model_type"),
    (SPECULATORS, configured("speculators_model_type", "eagle3"), "'eagle3', which is no block drafter"),
    (SPECULATORS, configured("sample_from_anchor", True), "sample_from_anchor is not supported"),
    (SPECULATORS, configured("mask_token_id", None), "mask_token_id is None"),
    (DFLASH, configured("mask_token_id", 64, "dflash_config"), "mask_token_id is 64, and must be one of the 64 tokens"),
    (DFLASH, configured("mask_token_id", True, "dflash_config"), "mask_token_id is True"),
    (DFLASH, configured("block_size", 1), "block_size is 1, and must be 2 to 128"),
    (DFLASH, configured("block_size", 129), "block_size is 129, and must be 2 to 128"),
    (DFLASH, without("block_size"), "it must give block_size as a positive whole number"),
    (DFLASH, configured("target_layer_ids", None, "dflash_config"), "target_layer_ids must list 1 to 16 layers"),
    (DFLASH, configured("target_layer_ids", [], "dflash_config"), "target_layer_ids must list 1 to 16 layers"),
    (DFLASH, configured("target_layer_ids", [1, 6], "dflash_config"), "names layer 6, and the target has 6 layers"),
    (DFLASH, configured("target_layer_ids", [-1, 3], "dflash_config"), "names layer -1, and the target has 6 layers"),
    (DFLASH, configured("num_target_layers", 8), "num_target_layers is 8, and the target has 6 layers"),
    (SPECULATORS, configured("aux_hidden_state_layer_ids", [7]), "names layer 7, and the target has 6 layers"),
    (DFLASH, configured("num_hidden_layers", 17), "17 layers are above the limit of 16"),
    (DFLASH, configured("hidden_size", 0), "it must give hidden_size as a positive whole number"),
    (SPECULATORS, configured("layer_types", [SLIDING, FULL], INSIDE), "need sliding_window, and it is None"),
    (SPECULATORS, configured("layer_types", [SLIDING], INSIDE), "layer_types must name full_attention or"),
    (
        SPECULATORS,
        configured("layer_types", [FULL, "linear_attention"], INSIDE),
        "layer_types must name full_attention",
    ),
    (DFLASH, configured("use_swa", True, "dflash_config"), "need sliding_window, and it is None"),
    (DFLASH, configured("rope_parameters", {"rope_type": "dynamic"}), "rotary positions of type dynamic"),
    (SPECULATORS, configured("draft_vocab_size", 65), "draft_vocab_size is 65, above vocab_size 64"),
    (DFLASH, without("fc.weight"), "fc.weight is missing"),
    (DFLASH, configured("num_hidden_layers", 1), "layer_types must name full_attention or"),
    (DFLASH, lambda config, _: config.update(num_hidden_layers=1, layer_types=[FULL]), "layers.1.* is not known"),
    (DFLASH, with_tensor("fc.weight", lambda tensor: tensor[:, :64]), r"fc.weight has shape \[32, 64\] instead of"),
    (DFLASH, with_tensor("norm.weight", spoiled), "norm.weight has values that are not finite"),
    (SPECULATORS, without("lm_head.weight"), "lm_head.weight is missing"),
    (SPECULATORS, without("d2t"), "d2t is missing"),
    (SPECULATORS, with_tensor("d2t", lambda tensor: tensor + 64), "d2t names token"),
    (
        SPECULATORS,
        with_tensor("d2t", lambda tensor: -torch.arange(len(tensor))),
        "d2t maps two draft tokens to one token",
    ),
]


@pytest.mark.parametrize(("case", "change", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_a_file_that_does_not_fit_is_refused_when_its_shape_is_read(
    case: str, change: Change, reason: str, tmp_path: Path
) -> None:
    config = json.loads((RECORDED / case / "config.json").read_text())
    tensors = load_file(RECORDED / case / "model.safetensors")
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=reason):
        read_shape(BLOCK, CheckpointRef(str(tmp_path)), NUM_TARGET_LAYERS)
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    ("case", "changes", "views"),
    [
        ("dflash_speculators_sliding", {}, (View(4, True, True), View())),
        ("dflash_speculators_sliding", {"sliding_window_non_causal": True}, (View(4, False, True), View())),
        (DFLASH, {}, ()),
        (DFLASH, {"layer_types": [FULL, FULL]}, ()),
        (DFLASH, SLIDES, (View(8, True), View())),
        (DFLASH, SLIDES | {"is_causal": False}, (View(8), View())),
        (DFLASH, {"dflash_config": {"use_swa": True, "swa_window_size": 6}}, (View(6), View(6))),
        (
            DFLASH,
            {"layer_types": [FULL, FULL], "dflash_config": {"use_swa": True, "swa_window_size": 6}},
            (View(6),) * 2,
        ),
        (DFLASH, {"dflash_config": {"causal": True}}, (View(None, True), View(None, True))),
    ],
)
def test_views_of_layers_are_read_from_both_formats(
    case: str, changes: dict[str, Any], views: tuple[View, ...], tmp_path: Path
) -> None:
    shutil.copytree(RECORDED / case, tmp_path / "one")
    config = json.loads((tmp_path / "one/config.json").read_text())
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (tmp_path / "one/config.json").write_text(json.dumps(config))
    assert load(tmp_path / "one").shape.views == views


@given(st.integers(1, 6), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.data())
def test_a_view_reads_the_positions_of_its_definition(num_nodes: int, lens: list[int], data: st.DataObject) -> None:
    view = View(data.draw(st.none() | st.integers(1, 12)), data.draw(st.booleans()), data.draw(st.booleans()))
    num_columns = max(lens) + num_nodes + 2
    seen = view.mask(torch.tensor(lens), num_nodes, num_columns)
    assert seen.shape == (len(lens), 1, num_nodes, num_columns)
    for row, length in enumerate(lens):
        for node in range(num_nodes):
            own = length + node
            for column in range(num_columns):
                if column >= length + num_nodes:
                    wanted = False  # beyond the block
                elif view.is_causal and column > own:
                    wanted = False
                elif view.window is None:
                    wanted = True
                elif view.from_anchor:
                    wanted = column >= length - view.window
                else:
                    wanted = abs(column - own) < view.window
                assert bool(seen[row, 0, node, column]) == wanted


def test_the_last_state_may_be_a_feature_and_the_block_size_may_be_inside(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / DFLASH, tmp_path / "one")
    config = json.loads((tmp_path / "one/config.json").read_text())
    config["dflash_config"] |= {"target_layer_ids": [1, 3, 5], "block_size": 7}
    config["block_size"] = None
    (tmp_path / "one/config.json").write_text(json.dumps(config))
    network = load(tmp_path / "one")
    assert network.feature_layers == (2, 4, 6)
    assert network.shape.max_levels == 6


@pytest.mark.parametrize("torn", [True, False])
def test_torn_and_pickled_weights_are_refused(torn: bool, tmp_path: Path) -> None:
    shutil.copytree(RECORDED / DFLASH, tmp_path / "one")
    file = tmp_path / "one/model.safetensors"
    if torn:
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
        (tmp_path / "one/pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Path("/")}))
    with pytest.raises(CheckpointError, match="it cannot be read"):
        load(tmp_path / "one")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    shutil.copy(RECORDED / DFLASH / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"it holds none of model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_weights_keep_their_type_unless_another_is_asked_for(dtype: str) -> None:
    network = load_head(BLOCK, CheckpointRef(str(RECORDED / DFLASH)), dtype, CPU, NUM_TARGET_LAYERS)
    assert network.fc.weight.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
    assert not any(parameter.requires_grad for parameter in network.parameters())
