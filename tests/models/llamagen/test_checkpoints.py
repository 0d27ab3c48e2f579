"""LlamaGen's published files are read as they are, and what cannot be read is refused with what to do."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.llamagen.checkpoints import load_gpt, read_gpt_shape, revision_of, save_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.shape import GPT_TYPE, GptShape
from models.loading.checkpoints import CheckpointError, CheckpointRef
from tests.llamagen_reference import LlamaGenReference
from tests.models.llamagen.layouts import (
    CLASSES,
    COLUMNS,
    DIM,
    FEATURES,
    FFN,
    GRID,
    HEADS,
    LAYERS,
    SIZE_B,
    VOCAB,
    lantern_config,
    lantern_weights,
    official_weights,
)

CPU = torch.device("cpu")
KINDS = ("text", "class")
SHAPES = {
    "text": GptShape(DIM, LAYERS, HEADS, FFN, VOCAB, GRID, "text", COLUMNS, condition_dim=FEATURES),
    "class": GptShape(DIM, LAYERS, HEADS, FFN, VOCAB, GRID, "class", 1, num_classes=CLASSES),
}
CODES = [3, 1, 7, 20, 9]
BESIDE = {"model_type": GPT_TYPE, "num_heads": HEADS, "grid": GRID}
"""The configuration that weights of no published size do not imply."""


def publish(folder: Path, content: Any, name: str = "t2i.pt", config: dict[str, Any] | None = BESIDE) -> CheckpointRef:
    torch.save(content, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return CheckpointRef(str(folder / name))


def publish_lantern(folder: Path, condition: str, **changes: Any) -> CheckpointRef:
    save_file(lantern_weights(official_weights(condition)), folder / "model.safetensors")
    config = {name: value for name, value in (lantern_config(condition) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return CheckpointRef(str(folder))


def condition_of(kind: str) -> Tensor | int:
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(8)) if kind == "text" else 2


@torch.inference_mode()
def states(gpt: Gpt, condition: Tensor | int, is_null: bool = False) -> Tensor:
    """Hidden states (L + T, D) of the condition and `CODES`, with the mask that training has."""
    num_padding = 0
    if isinstance(condition, Tensor):
        num_padding = gpt.shape.num_condition_tokens - len(condition)
        padded = torch.cat([torch.zeros(num_padding, FEATURES), condition])
        prompt = gpt.null_text() if is_null else gpt.embed_text(padded)
    else:
        prompt = gpt.embed_class(CLASSES if is_null else condition)
    embeds = torch.cat([prompt, gpt.get_input_embeddings()(torch.tensor(CODES))])[None]
    length = embeds.shape[1]
    mask = torch.ones(length, length).tril().bool()
    mask[:, :num_padding] = False
    mask |= torch.eye(length).bool()
    out: Tensor = gpt(embeds, torch.arange(length)[None], attention_mask=mask[None, None]).last_hidden_state[0]
    return out


def expect_the_published_model(gpt: Gpt, kind: str) -> None:
    """Both lanes give the states and the logits that the slow reference computes from the published tensors."""
    reference = LlamaGenReference(official_weights(kind), HEADS, GRID)
    condition = condition_of(kind)
    prompt, null, padding = reference.prompts(condition)
    for inputs, is_null in ((prompt, False), (null, True)):
        expected = reference.states(inputs, padding, CODES)
        result = states(gpt, condition, is_null)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(result, states(gpt, condition, not is_null), atol=1e-2)
    logits = gpt.output(states(gpt, condition))[-1]
    torch.testing.assert_close(logits, reference.next_logits(prompt, padding, CODES), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", ["model", "module", "state_dict", None])
def test_a_published_file_is_loaded_under_any_wrapping_key(tmp_path: Path, wrapper: str | None, kind: str) -> None:
    weights = official_weights(kind)
    ref = publish(tmp_path, weights if wrapper is None else {wrapper: weights, "steps": 7})
    assert read_gpt_shape(ref) == SHAPES[kind]
    gpt = load_gpt(ref, "auto", CPU)
    expect_the_published_model(gpt, kind)
    assert not any(parameter.requires_grad for parameter in gpt.parameters())
    assert not gpt.training


@pytest.mark.parametrize("kind", KINDS)
def test_lanterns_folder_is_the_same_model(tmp_path: Path, kind: str) -> None:
    ref = publish_lantern(tmp_path, kind)
    assert read_gpt_shape(ref) == SHAPES[kind]
    expect_the_published_model(load_gpt(ref, "auto", CPU), kind)


def test_lanterns_weights_may_be_stored_in_several_files(tmp_path: Path) -> None:
    ref = publish_lantern(tmp_path, "text")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, tmp_path / "model-00002-of-00002.safetensors")
    expect_the_published_model(load_gpt(ref, "auto", CPU), "text")


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_folder_reads_back_and_holds_the_published_tensors(tmp_path: Path, kind: str) -> None:
    gpt = load_gpt(publish(tmp_path, official_weights(kind)), "auto", CPU)
    save_gpt(gpt, tmp_path / "ours")
    again = load_gpt(CheckpointRef(str(tmp_path / "ours")), "auto", CPU)
    assert again.shape == gpt.shape == SHAPES[kind]
    expect_the_published_model(again, kind)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    expected = official_weights(kind)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], expected[name]) for name in expected)


def test_sizes_other_than_the_published_survive_our_own_folder(tmp_path: Path) -> None:
    shape = GptShape(24, 1, 2, 40, 17, 4, "class", 1, num_classes=2, rms_eps=1e-3, rope_base=50.0)
    save_gpt(Gpt(shape), tmp_path)
    assert read_gpt_shape(CheckpointRef(str(tmp_path))) == shape


def test_weights_are_stored_and_loaded_in_the_type_asked_for(tmp_path: Path) -> None:
    gpt = load_gpt(publish(tmp_path, official_weights("text")), "bfloat16", CPU)
    assert {parameter.dtype for parameter in gpt.parameters()} == {torch.bfloat16}
    save_gpt(gpt, tmp_path / "half", torch.float16)
    assert {value.dtype for value in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}
    assert load_gpt(CheckpointRef(str(tmp_path / "half")), "auto", CPU).output.weight.dtype == torch.float16
    assert load_gpt(CheckpointRef(str(tmp_path / "half")), "float32", CPU).rotary.cos.dtype == torch.float32


def test_training_state_in_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    content = {"optimizer": {"lr": 1e-4}, "args": Namespace(epochs=3), "model": official_weights("text")}
    expect_the_published_model(load_gpt(publish(tmp_path, content), "auto", CPU), "text")


def test_an_old_files_rotary_table_is_not_loaded(tmp_path: Path) -> None:
    stray = {"freqs_cis": torch.full((COLUMNS + GRID * GRID, DIM // HEADS // 2, 2), torch.nan)}
    ref = publish(tmp_path, official_weights("text") | stray)
    assert read_gpt_shape(ref) == SHAPES["text"]
    expect_the_published_model(load_gpt(ref, "auto", CPU), "text")


def named_weights(columns: int = 120) -> dict[str, Tensor]:
    """Weights with the shapes of the published size B that need no memory: the tensors are views of one number."""
    shapes = {name: tuple(value.shape) for name, value in official_weights("text", layers=12, columns=columns).items()}
    sizes = {DIM: 768, 3 * DIM: 3 * 768, FFN: 2048, VOCAB: 16384, FEATURES: 2048}
    scalar = torch.zeros(1, dtype=torch.bfloat16)
    return {name: scalar.expand([sizes.get(side, side) for side in shape]) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "grid"), [("t2i_B_stage1_256.pt", 16), ("c2i_B_384.pt", 24), ("t2i_B_stage2_512.pt", 32)]
)
def test_a_published_size_implies_its_heads_and_a_published_name_its_grid(tmp_path: Path, name: str, grid: int) -> None:
    ref = publish(tmp_path, {"model": named_weights()}, name, config=None)
    assert read_gpt_shape(ref) == replace(SIZE_B, grid=grid)


def test_a_config_file_overrides_the_shape_of_the_published_name(tmp_path: Path) -> None:
    config = {"model_type": GPT_TYPE, "grid": 24, "num_heads": 6, "rms_eps": 1e-6}
    ref = publish(tmp_path, {"model": named_weights()}, "t2i_B_stage1_256.pt", config)
    assert read_gpt_shape(ref) == replace(SIZE_B, grid=24, num_heads=6, rms_eps=1e-6)


# --- what is refused ---------------------------------------------------------------------------------------------


def refusal(ref: CheckpointRef) -> str:
    """The message of both readers, which agree and name the file."""
    with pytest.raises(CheckpointError) as result:
        read_gpt_shape(ref)
    with pytest.raises(CheckpointError) as said_too:
        load_gpt(ref, "auto", CPU)
    assert str(result.value) == str(said_too.value)
    assert str(result.value).startswith(ref.path)
    return str(result.value)


def test_a_refusal_of_an_unknown_grid_or_number_of_heads_names_the_key_to_write(tmp_path: Path) -> None:
    heads = {"model_type": GPT_TYPE, "num_heads": HEADS}
    assert 'must give "grid" (16 for 256 px' in refusal(publish(tmp_path, official_weights("text"), config=heads))
    grid = {"model_type": GPT_TYPE, "grid": GRID}
    message = refusal(publish(tmp_path, official_weights("text"), config=grid))
    assert "32 wide with 2 layers is no published size" in message
    assert 'must give "num_heads"' in message


def test_a_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    ref = publish(tmp_path, official_weights("text"))
    content = Path(ref.path).read_bytes()
    Path(ref.path).write_bytes(content[: len(content) // 2])
    assert "it cannot be read" in refusal(ref)
    Path(ref.path).write_bytes(b"")
    assert "it cannot be read" in refusal(ref)


def test_a_torn_safetensors_file_is_refused_by_name(tmp_path: Path) -> None:
    ref = publish_lantern(tmp_path, "text")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors: it cannot be read" in refusal(ref)


class Bomb:
    """Writes a file when it is unpickled the careless way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_inside_a_pickle_is_never_run(tmp_path: Path) -> None:
    ref = publish(tmp_path, {"model": official_weights("text"), "args": Bomb(tmp_path / "boom")})
    assert "tensors only, no other pickled objects" in refusal(ref)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "lost",
    [
        "layers.1.attention.wqkv.weight",
        "layers.0.ffn_norm.weight",
        "output.weight",
        "cls_embedding.cap_proj.fc2.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, lost: str) -> None:
    weights = official_weights("text")
    del weights[lost]
    assert f"{lost} is missing" in refusal(publish(tmp_path, {"model": weights}))


@pytest.mark.parametrize("lost", ["layers.0.feed_forward.w1.weight", "cls_embedding.uncond_embedding"])
def test_a_missing_tensor_that_defines_a_size_is_named(tmp_path: Path, lost: str) -> None:
    weights = official_weights("text")
    del weights[lost]
    assert "is missing" in refusal(publish(tmp_path, {"model": weights}))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = official_weights("text") | {"layers.1.attention.wqkv.weight": torch.zeros(2 * DIM, DIM)}
    message = refusal(publish(tmp_path, weights))
    assert f"layers.1.attention.wqkv.weight has shape {[2 * DIM, DIM]} instead of {[3 * DIM, DIM]}" in message
    weights = official_weights("text") | {"tok_embeddings.weight": torch.zeros(VOCAB)}
    assert "tok_embeddings.weight has shape [40], not that of a matrix" in refusal(publish(tmp_path, weights))


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    weights = official_weights("text") | {"layers.0.attention.wqkv.bias": torch.zeros(3 * DIM)}
    assert "layers.0.attention.wqkv.bias is not known" in refusal(publish(tmp_path, weights))


def test_weights_of_another_network_are_refused_by_their_kind(tmp_path: Path) -> None:
    vq = {"quantize.embedding.weight": torch.zeros(4, 8)}
    assert "this is a VQ model, not LlamaGen's GPT" in refusal(publish(tmp_path, {"model": vq}))
    assert "something else (a.weight)" in refusal(publish(tmp_path, {"a.weight": torch.zeros(1)}))
    assert "nothing at all" in refusal(publish(tmp_path, {}))
    assert "a plain state dict of tensors" in refusal(publish(tmp_path, [torch.zeros(1)]))


def test_a_config_that_contradicts_the_weights_is_refused_with_both_values(tmp_path: Path) -> None:
    message = refusal(publish(tmp_path, official_weights("text"), config=BESIDE | {"dim": 64}))
    assert "config.json sets dim to 64, but the weights have 32" in message
    message = refusal(publish_lantern(tmp_path, "text", num_hidden_layers=3))
    assert "config.json sets num_layers to 3, but the weights have 2" in message
    message = refusal(publish_lantern(tmp_path, "text", input_type="c2i"))
    assert "sets condition to 'class', but the weights have 'text'" in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BESIDE | {"grid": 0}, "grid must be a positive whole number, not 0"),
        (BESIDE | {"num_heads": "4"}, "num_heads must be a positive whole number, not '4'"),
        (BESIDE | {"num_heads": 5}, "dim is 32 and num_heads 5"),
        (BESIDE | {"gird": 3}, "config.json gives gird, which no LlamaGen has"),
        ({"model_type": "t5"}, "config.json beside it is of 't5', but the weights are LlamaGen's"),
        ({"grid": 3}, "config.json beside it is of None"),
    ],
)
def test_a_config_of_another_model_or_of_impossible_sizes_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(publish(tmp_path, official_weights("text"), config=config))


def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    ref = publish(tmp_path, official_weights("text"))
    for text, result in (("{", "not valid JSON"), ("[]", "must hold a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"config.json: .*{result}"):
            load_gpt(ref, "auto", CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": None}, "has to give block_size"),
        ({"block_size": 10}, "block_size in config.json must be a square number, not 10"),
        ({"block_size": "9"}, "must be a square number, not '9'"),
        ({"num_attention_heads": None}, "has to give num_attention_heads"),
        ({"rms_norm_eps": None}, "has to give rms_norm_eps"),
        ({"num_key_value_heads": 2}, "as many key heads as query heads"),
        ({"input_type": "t2i2"}, "input_type in config.json must be t2i or c2i, not 't2i2'"),
    ],
)
def test_a_config_of_lantern_without_required_fields_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    assert message in refusal(publish_lantern(tmp_path, "text", **change))


def test_paths_without_a_checkpoint_are_refused_with_the_expected_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(CheckpointRef(str(tmp_path / "absent.pt")))
    assert "no such folder" in refusal(CheckpointRef(str(tmp_path / "absent")))
    assert "it holds no weights: neither model.safetensors nor a .pt file" in refusal(CheckpointRef(str(tmp_path)))
    torch.save({}, tmp_path / "a.pt")
    torch.save({}, tmp_path / "b.pt")
    assert "it holds 2 weight files; name one, such as" in refusal(CheckpointRef(str(tmp_path)))


def test_a_folder_with_one_published_file_is_that_file(tmp_path: Path) -> None:
    publish(tmp_path, official_weights("class"))
    expect_the_published_model(load_gpt(CheckpointRef(str(tmp_path)), "auto", CPU), "class")


def test_the_revision_changes_with_the_weights_and_with_the_config(tmp_path: Path) -> None:
    ref = publish(tmp_path, official_weights("text"))
    first, whole = revision_of(ref), revision_of(CheckpointRef(str(tmp_path)))
    assert revision_of(publish(tmp_path, official_weights("text"))) == first
    revisions = {first, whole}
    for weights, config in ((6, BESIDE), (5, BESIDE | {"rms_eps": 1e-6})):
        publish(tmp_path, official_weights("text", seed=weights), config=config)
        revisions |= {revision_of(ref), revision_of(CheckpointRef(str(tmp_path)))}
    assert len(revisions) == 6


def test_a_file_of_the_hub_is_fetched_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    torch.save({"model": named_weights()}, snapshot / "t2i_B_stage1_256.pt")
    asked: list[tuple[str, str, str | None]] = []

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        if file not in {entry.name for entry in snapshot.iterdir()}:
            raise OSError("404: no such entry")
        return str(snapshot / file)

    monkeypatch.setattr("models.llamagen.checkpoints.hf_hub_download", download)
    ref = CheckpointRef("owner/name/t2i_B_stage1_256.pt", "abc123")
    assert read_gpt_shape(ref) == SIZE_B
    assert revision_of(ref) == "abc123"
    assert set(asked) == {("owner/name", "t2i_B_stage1_256.pt", "abc123")}
    assert "it cannot be fetched from the hub: 404: no such entry" in refusal(CheckpointRef("owner/name/other.pt"))


def test_of_a_hub_id_only_the_config_is_read_for_its_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(lantern_config("text")))
    monkeypatch.setattr("models.heads.files.head_folder", lambda *_: tmp_path)
    assert read_gpt_shape(CheckpointRef("owner/name")) == SHAPES["text"]
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["class"].to_config()))
    assert read_gpt_shape(CheckpointRef("owner/name")) == SHAPES["class"]
    (tmp_path / "config.json").write_text(json.dumps(BESIDE))
    with pytest.raises(CheckpointError, match=r"owner/name: config\.json does not give dim"):
        read_gpt_shape(CheckpointRef("owner/name"))
