"""EAGLE heads: the public files are read as they are, and the network is the published one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.heads.formats import EAGLE
from models.heads.loader import load_head, read_shape
from models.heads.writer import save_eagle
from models.loading.checkpoints import CheckpointError, CheckpointRef

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 11, 16, 24, 4, 2
HEAD_DIM = HIDDEN // HEADS
CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
}


def public_weights(bias: bool = True, qkv_bias: bool = False) -> dict[str, Tensor]:
    """Random weights under the names of the published files."""
    generator = torch.Generator().manual_seed(3)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (kv, HIDDEN),
        "layers.0.self_attn.v_proj.weight": (kv, HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    }
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    if qkv_bias:
        for name, size in (("q", HIDDEN), ("k", kv), ("v", kv)):
            shapes[f"layers.0.self_attn.{name}_proj.bias"] = (size,)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def publish(folder: Path, weights: dict[str, Tensor], **changes: Any) -> CheckpointRef:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    torch.save(weights, folder / "pytorch_model.bin")
    return CheckpointRef(str(folder))


def by_hand(w: dict[str, Tensor], tokens: Tensor, features: Tensor) -> Tensor:
    """The published layer written out: no norm before attention, none at the end; (T, D) guessed features."""
    x = torch.cat([w["embed_tokens.weight"][tokens], features], -1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
    layer = {name.removeprefix("layers.0."): value for name, value in w.items()}

    def project(name: str) -> Tensor:
        out = x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0.0)
        return out.view(len(tokens), -1, HEAD_DIM).transpose(0, 1)

    angles = torch.arange(len(tokens))[:, None] * 500.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)

    def rotate(value: Tensor) -> Tensor:
        a, b = value.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    q, k, v = rotate(project("q")), rotate(project("k")), project("v")
    k, v = (value.repeat_interleave(HEADS // KV_HEADS, 0) for value in (k, v))
    scores = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(
        torch.ones(len(tokens), len(tokens)).triu(1).bool(), -torch.inf
    )
    x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer["post_attention_layernorm.weight"]
    gate, up = normed @ layer["mlp.gate_proj.weight"].T, normed @ layer["mlp.up_proj.weight"].T
    return x + (torch.nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T


@pytest.mark.parametrize(("bias", "qkv_bias"), [(True, False), (False, False), (True, True)])
def test_a_loaded_head_computes_the_published_layer(tmp_path: Path, bias: bool, qkv_bias: bool) -> None:
    weights = public_weights(bias, qkv_bias)
    # Publishers write `bias` only where it is false.
    changes = ({} if bias else {"bias": False}) | ({"qkv_bias": True} if qkv_bias else {})
    network = load_head(EAGLE, publish(tmp_path / "head", weights, **changes), "auto", CPU)
    tokens = torch.tensor([3, 1, 4, 1, 5])
    features = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    fused = network.fuse(network.embed_tokens(tokens), features)
    out = network(fused[None], torch.arange(5)[None]).last_hidden_state[0]
    torch.testing.assert_close(out, by_hand(weights, tokens, features), atol=2e-5, rtol=1e-4)


def test_safetensors_and_torch_files_load_alike_and_inverse_frequencies_are_passed_over(tmp_path: Path) -> None:
    weights = public_weights() | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    head = load_head(EAGLE, publish(tmp_path / "one", weights), "auto", CPU)
    ref = publish(tmp_path / "two", weights)
    (tmp_path / "two" / "pytorch_model.bin").unlink()
    save_file(weights, tmp_path / "two" / "model.safetensors")
    two = load_head(EAGLE, ref, "auto", CPU)
    assert read_shape(EAGLE, ref).layers.vocab_size == VOCAB
    for mine, other in zip(head.state_dict().values(), two.state_dict().values(), strict=True):
        assert torch.equal(mine, other)


def test_saved_heads_have_the_public_names_and_load_back_equal(tmp_path: Path) -> None:
    network = load_head(EAGLE, publish(tmp_path / "one", public_weights()), "auto", CPU)
    save_eagle(network, tmp_path / "two", torch.float16)
    written = torch.load(tmp_path / "two" / "pytorch_model.bin", weights_only=True)
    assert set(written) == set(public_weights())
    again = load_head(EAGLE, CheckpointRef(str(tmp_path / "two")), "auto", CPU)
    assert again.fc.weight.dtype == torch.float16
    assert again.shape.layers.rope_parameters["rope_theta"] == 500.0
    assert again.shape.layers.rms_norm_eps == 1e-5
    for mine, other in zip(network.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(mine.half(), other)


def remove(name: str) -> Any:
    return lambda weights: weights.pop(name)


def widen(weights: dict[str, Tensor]) -> None:
    weights["fc.weight"] = torch.zeros(HIDDEN, 3 * HIDDEN)


def third_generation(weights: dict[str, Tensor]) -> None:
    weights["midlayer.self_attn.q_proj.weight"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("damage", "changes", "message"),
    [
        (remove("fc.bias"), {}, "fc.bias is missing"),
        (remove("layers.0.mlp.up_proj.weight"), {}, "up_proj.weight is missing"),
        (widen, {}, r"fc.weight has shape \[16, 48\] instead of \[16, 32\]"),
        (third_generation, {}, "EAGLE-3"),
        (lambda _: None, {"num_hidden_layers": 2}, "one layer, not 2"),
        (lambda _: None, {"hidden_size": "16"}, "hidden_size as a positive whole number"),
        (lambda _: None, {"bias": "yes"}, "must be true or false"),
        (lambda _: None, {"vocab_size": 12}, r"embed_tokens.weight has shape \[11, 16\] instead of \[12, 16\]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_both_readers(
    tmp_path: Path, damage: Any, changes: dict[str, Any], message: str
) -> None:
    weights = public_weights()
    damage(weights)
    ref = publish(tmp_path / "head", weights, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_shape(EAGLE, ref)
    with pytest.raises(CheckpointError, match=message):
        load_head(EAGLE, ref, "auto", CPU)


def test_files_that_hold_more_than_tensors_or_nothing_are_refused(tmp_path: Path) -> None:
    ref = publish(tmp_path / "head", public_weights())
    file = tmp_path / "head" / "pytorch_model.bin"
    torch.save({"embed_tokens.weight": Path("/")}, file)
    with pytest.raises(CheckpointError, match="tensors only"):
        load_head(EAGLE, ref, "auto", CPU)
    file.write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_shape(EAGLE, ref)
    file.unlink()
    with pytest.raises(CheckpointError, match="holds none of"):
        load_head(EAGLE, ref, "auto", CPU)
    (tmp_path / "head" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"needs its config.json"):
        read_shape(EAGLE, ref)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_head(EAGLE, CheckpointRef(str(tmp_path / "nowhere")), "auto", CPU)
