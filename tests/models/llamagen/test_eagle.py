"""Tests that LANTERN's drafters load unchanged: EAGLE's network, with grid rotary positions one column early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from models.heads.formats import EAGLE
from models.heads.loader import load_head, read_shape
from models.llamagen.eagle import (
    image_eagle,
    image_eagle_shape,
    image_head,
    save_image_eagle,
)
from models.llamagen.rotary import GridRotary
from models.llamagen.shape import GptShape
from models.loading.checkpoints import CheckpointError, CheckpointRef
from tests.llamagen_reference import turn, turns
from tests.models.llamagen.layouts import COLUMNS, DIM, FFN, GRID, HEADS, SIZE_XL, VOCAB
from tests.models.llamagen.test_checkpoints import SHAPES

CPU = torch.device("cpu")
TARGET = SHAPES["text"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": DIM,
    "caption_dim": 2048,
    "class_dropout_p": 0.0,
    "intermediate_size": FFN,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": HEADS,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": VOCAB,
}
"""LANTERN's `llamagen_t2i_config.json`, smaller, without `input_type`: a grid of 3 is no published one."""


def published() -> dict[str, Tensor]:
    """Random weights under the released drafters' names."""
    generator = torch.Generator().manual_seed(4)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, DIM),
        "layers.0.self_attn.q_proj.weight": (DIM, DIM),
        "layers.0.self_attn.k_proj.weight": (DIM, DIM),
        "layers.0.self_attn.v_proj.weight": (DIM, DIM),
        "layers.0.self_attn.o_proj.weight": (DIM, DIM),
        "layers.0.mlp.gate_proj.weight": (FFN, DIM),
        "layers.0.mlp.up_proj.weight": (FFN, DIM),
        "layers.0.mlp.down_proj.weight": (DIM, FFN),
        "layers.0.post_attention_layernorm.weight": (DIM,),
        "fc.weight": (DIM, 2 * DIM),
        "fc.bias": (DIM,),
    }
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def publish(folder: Path, **changes: Any) -> CheckpointRef:
    torch.save(published(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return CheckpointRef(str(folder))


def by_hand(tokens: Tensor, features: Tensor) -> Tensor:
    """The released network written out, heads one by one; (T, D) guessed features."""
    w = published()
    x = torch.cat([w["embed_tokens.weight"][tokens], features], -1) @ w["fc.weight"].T + w["fc.bias"]
    query, key, value = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    size = DIM // HEADS
    rotation = turns(len(tokens), size, COLUMNS - 1, GRID)
    causal = torch.ones(len(tokens), len(tokens)).tril().bool()
    heads = []
    for head in range(HEADS):
        span = slice(head * size, (head + 1) * size)
        scores = turn(query[:, span], rotation) @ turn(key[:, span], rotation).T / size**0.5
        heads.append(scores.masked_fill(~causal, -torch.inf).softmax(-1) @ value[:, span])
    x = x + torch.cat(heads, -1) @ w["layers.0.self_attn.o_proj.weight"].T
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w["layers.0.post_attention_layernorm.weight"]
    gate, up = (normed @ w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T


def expect_the_published_network(ref: CheckpointRef) -> None:
    network = load_head(image_head(EAGLE, TARGET), ref, "float32", CPU)
    length = COLUMNS + GRID * GRID - 1
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    features = torch.randn(length, DIM, generator=generator)
    fused = network.fuse(network.get_input_embeddings()(tokens), features)
    states = network(fused[None], torch.arange(length)[None]).last_hidden_state[0]
    torch.testing.assert_close(states, by_hand(tokens, features), atol=1e-4, rtol=1e-4)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_a_released_drafter_is_the_released_network(tmp_path: Path) -> None:
    expect_the_published_network(publish(tmp_path))


def test_a_drafter_in_safetensors_is_the_same(tmp_path: Path) -> None:
    publish(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    save_file(published(), tmp_path / "model.safetensors")
    expect_the_published_network(CheckpointRef(str(tmp_path)))


def test_the_token_embedding_of_a_drafter_is_read_from_its_file(tmp_path: Path) -> None:
    network = load_head(image_head(EAGLE, TARGET), publish(tmp_path), "auto", CPU)
    assert torch.equal(network.embed_tokens.weight, published()["embed_tokens.weight"])


def test_a_saved_drafter_has_the_released_layout_and_loads_back(tmp_path: Path) -> None:
    network = load_head(image_head(EAGLE, TARGET), publish(tmp_path), "auto", CPU)
    save_image_eagle(network, TARGET, tmp_path / "again")
    stored = torch.load(tmp_path / "again" / "pytorch_model.bin", weights_only=True)
    assert stored.keys() == published().keys()
    assert all(torch.equal(stored[name], value) for name, value in published().items())
    expect_the_published_network(CheckpointRef(str(tmp_path / "again")))


def test_a_new_network_has_the_released_sizes_and_rotary_embedding(tmp_path: Path) -> None:
    shape = image_eagle_shape(SIZE_XL)
    llama = shape.layers
    assert (llama.hidden_size, llama.intermediate_size) == (1280, 3584)
    assert (llama.num_attention_heads, llama.head_dim) == (20, 64)
    assert (llama.vocab_size, llama.rms_norm_eps, shape.bias, shape.qkv_bias) == (16384, 1e-6, True, False)
    small = image_eagle(image_eagle_shape(TARGET), TARGET)
    rotary = small.rotary
    assert isinstance(rotary, GridRotary)
    assert (rotary.num_condition_tokens, rotary.grid) == (COLUMNS - 1, GRID)
    assert image_eagle(image_eagle_shape(SHAPES["class"]), SHAPES["class"]).rotary.num_condition_tokens == 0
    save_image_eagle(small, TARGET, tmp_path)
    assert read_shape(image_head(EAGLE, TARGET), CheckpointRef(str(tmp_path))).layers.rms_norm_eps == 1e-6


def refusal(ref: CheckpointRef, target: GptShape) -> str:
    with pytest.raises(CheckpointError) as result:
        read_shape(image_head(EAGLE, target), ref)
    with pytest.raises(CheckpointError, match="trained for this target"):
        load_head(image_head(EAGLE, target), ref, "auto", CPU)
    return str(result.value)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    ref = publish(tmp_path)
    wide = replace(TARGET, dim=64)
    assert "reads states of width 32, and the target's are 64 wide" in refusal(ref, wide)
    assert "knows 40 codes, and the target 41" in refusal(ref, replace(TARGET, vocab_size=41))


def test_a_drafter_of_other_images_is_refused(tmp_path: Path) -> None:
    assert "grid is 16, and the target's is 3" in refusal(publish(tmp_path, input_type="t2i"), TARGET)
    assert "grid is 32, and the target's is 3" in refusal(publish(tmp_path, input_type="t2i2"), TARGET)
    assert "condition is 'class', and the target's is 'text'" in refusal(publish(tmp_path, input_type="c2i"), TARGET)
    small = image_eagle(image_eagle_shape(TARGET), TARGET)
    save_image_eagle(small, TARGET, tmp_path)
    assert "grid is 3, and the target's is 4" in refusal(CheckpointRef(str(tmp_path)), replace(TARGET, grid=4))


def test_heads_that_rows_and_columns_cannot_share_are_refused(tmp_path: Path) -> None:
    ref = publish(tmp_path, num_attention_heads=16, num_key_value_heads=16)
    assert "its heads have 2 dimensions" in refusal(ref, TARGET)
    with pytest.raises(ValueError, match="of width 32, and the target's are 64"):
        image_eagle(image_eagle_shape(TARGET), replace(TARGET, dim=64))
