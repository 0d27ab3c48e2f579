"""Prompts get the same features as in LlamaGen; given features are checked; each kind of bad prompt has its error."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel, T5ForConditionalGeneration

from models.inputs.processing import PromptError
from models.llamagen.condition import (
    MAX_CHARACTERS,
    NUM_REMEMBERED,
    EmptyPrompt,
    PromptTooLong,
    T5Condition,
    check_t5,
    load_t5,
    pad_left,
)
from models.llamagen.shape import GptShape
from models.loading.checkpoints import CheckpointError, CheckpointRef
from tests.models.llamagen.test_checkpoints import Bomb

CPU = torch.device("cpu")
WIDTH, MAX_TOKENS = 16, 8
GPT = GptShape(32, 2, 4, 48, 40, 3, "text", MAX_TOKENS, condition_dim=WIDTH)
WORDS = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {word: 3 + i for i, word in enumerate("abcdefghi")}
T5 = {
    "vocab_size": len(WORDS),
    "d_model": WIDTH,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def tokenizer(ends: bool = True) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if ends:
        core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>", pad_token="<pad>")


def write(folder: Path, ends: bool = True, model: Any = T5EncoderModel, **changes: Any) -> CheckpointRef:
    torch.manual_seed(3)
    model(T5Config(**(T5 | changes))).save_pretrained(folder)
    tokenizer(ends).save_pretrained(folder)
    return CheckpointRef(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    write(path)
    return path


@pytest.fixture
def t5(folder: Path) -> T5Condition:
    return load_t5(CheckpointRef(str(folder)), GPT, "float32", CPU)


def published_features(folder: Path, text: str) -> torch.Tensor:
    """Encoded the way LlamaGen does it: padded on the right to the full length, then cut to the valid rows."""
    tokens = tokenizer()(text, max_length=MAX_TOKENS, padding="max_length", truncation=True, return_tensors="pt")
    model = T5EncoderModel.from_pretrained(folder).eval()
    with torch.no_grad():
        out = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state[0]
    return out[: int(tokens["attention_mask"].sum())]


@pytest.mark.parametrize("text", ["a", "b a c", "a b c d e f g"])
def test_features_are_the_valid_rows_of_the_published_encoding(folder: Path, t5: T5Condition, text: str) -> None:
    expected = published_features(folder, text)
    assert len(expected) == len(text.split()) + 1, "the end token is kept"
    torch.testing.assert_close(t5.encode(text), expected, atol=1e-5, rtol=1e-5)


def test_prompts_are_cleaned_before_they_are_read(t5: T5Condition) -> None:
    assert torch.equal(t5.encode("  A http://shop.com <b>B</b>"), t5.encode("a b"))


def test_a_prompt_that_just_fits_is_read_and_one_token_more_is_refused_with_the_count(t5: T5Condition) -> None:
    assert t5.encode("a b c d e f g").shape == (MAX_TOKENS, WIDTH)
    with pytest.raises(
        PromptTooLong, match="the prompt has 9 tokens, and the model takes 8; shorten it, or allow trunc"
    ):
        t5.encode("a b c d e f g h")


def test_truncation_keeps_the_end_token_as_the_published_scripts_do(folder: Path) -> None:
    t5 = load_t5(CheckpointRef(str(folder)), GPT, "float32", CPU, truncate=True)
    long = "a b c d e f g h i"
    torch.testing.assert_close(t5.encode(long), published_features(folder, long), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(t5.encode(long), t5.encode("a b c d e f g"))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", EmptyPrompt, "the prompt is empty"),
        (" \n\t", EmptyPrompt, "the prompt is empty"),
        ("http://shop.com", EmptyPrompt, "nothing is left of the prompt .*: 'http://shop.com'"),
        ("***", EmptyPrompt, "nothing is left of the prompt"),
        ("a" * (MAX_CHARACTERS + 1), PromptTooLong, f"has {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS}"),
        (None, PromptError, "a prompt must be text, not NoneType"),
        (7, PromptError, "a prompt must be text, not int"),
        (b"a", PromptError, "a prompt must be text, not bytes"),
    ],
)
def test_prompts_without_text_are_refused_with_the_reason(
    t5: T5Condition, text: Any, kind: type[PromptError], message: str
) -> None:
    with pytest.raises(PromptError, match=message) as refused:
        t5.encode(text)
    assert refused.type is kind


def test_a_tokenizer_that_fails_fails_the_prompt_alone(t5: T5Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("no")

    monkeypatch.setattr(t5, "tokenizer", fail)
    with pytest.raises(PromptError, match="the tokenizer refuses the prompt: no"):
        t5.encode("a")


def test_values_that_are_not_finite_fail_the_prompt_and_are_not_remembered(folder: Path) -> None:
    t5 = load_t5(CheckpointRef(str(folder)), GPT, "float32", CPU)
    norm: Any = t5.model.get_submodule("encoder.final_layer_norm")
    norm.weight.data[3] = torch.inf
    for _ in range(2):
        with pytest.raises(PromptError, match="values that are not finite for this prompt; try another dtype"):
            t5.encode("a")


def test_several_images_of_one_prompt_encode_it_once(t5: T5Condition) -> None:
    first = t5.encode("a b")
    assert t5.encode("A  b") is first
    assert t5.num_forwards == 1


def test_only_the_prompts_used_last_are_remembered(t5: T5Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.llamagen.condition.NUM_REMEMBERED", 2)
    t5 = T5Condition(t5.model, t5.tokenizer)
    for text in ("a", "b", "a", "c", "a", "b"):  # "b" makes way for "c", and "c" for "b"; "a" stays
        t5.encode(text)
    assert t5.num_forwards == 4
    assert NUM_REMEMBERED == 64


def test_a_full_t5_checkpoint_gives_its_encoder(tmp_path: Path) -> None:
    ref = write(tmp_path, model=T5ForConditionalGeneration)
    features = load_t5(ref, GPT, "float32", CPU).encode("a b c")
    torch.testing.assert_close(features, published_features(tmp_path, "a b c"), atol=1e-5, rtol=1e-5)


def test_weights_in_torchs_own_format_are_read_without_running_any_pickle(tmp_path: Path) -> None:
    ref = write(tmp_path)
    expected = published_features(tmp_path, "a b c")
    state = T5EncoderModel.from_pretrained(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(load_t5(ref, GPT, "float32", CPU).encode("a b c"), expected, atol=1e-5, rtol=1e-5)
    torch.save(state | {"bomb": Bomb(tmp_path / "boom")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: it cannot be read"):
        load_t5(ref, GPT, "float32", CPU)
    assert not (tmp_path / "boom").exists()


def test_the_encoder_runs_in_the_configured_dtype_without_gradients(folder: Path) -> None:
    t5 = load_t5(CheckpointRef(str(folder)), GPT, "bfloat16", CPU)
    assert t5.encode("a").dtype == torch.bfloat16
    assert not t5.encode("a").requires_grad
    assert not any(parameter.requires_grad for parameter in t5.model.parameters())
    assert t5.condition_dim == WIDTH


def test_an_encoder_that_the_gpt_was_not_trained_with_is_refused(tmp_path: Path) -> None:
    ref = write(tmp_path, d_model=32)
    for check in (lambda: check_t5(ref, GPT), lambda: load_t5(ref, GPT, "auto", CPU)):
        with pytest.raises(CheckpointError, match="features are 32 wide, and the GPT reads 16; take the encoder"):
            check()


def test_paths_without_a_t5_checkpoint_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        check_t5(CheckpointRef(str(tmp_path / "absent")), GPT)
    (tmp_path / "config.json").write_text('{"model_type": ["t5"]}')
    with pytest.raises(CheckpointError, match=r"model_type in its config\.json must be text, not \['t5'\]"):
        check_t5(CheckpointRef(str(tmp_path)), GPT)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match="the text encoder must be a T5, not 'llama'"):
        check_t5(CheckpointRef(str(tmp_path)), GPT)
    check_t5(CheckpointRef(str(folder)), GPT)


def test_an_encoder_with_torn_missing_or_partial_weights_is_refused(tmp_path: Path) -> None:
    ref = write(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: it cannot be read"):
        check_t5(ref, GPT)
    file.unlink()
    with pytest.raises(CheckpointError, match="it holds no weights"):
        check_t5(ref, GPT)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": print}))
    with pytest.raises(CheckpointError, match=r"cannot be read \(tensors only, no other pickled objects\)") as refusal:
        check_t5(ref, GPT)
    assert "to `False`" not in str(refusal.value)
    state = T5EncoderModel(T5Config(**T5)).state_dict()
    norm = state.pop("encoder.final_layer_norm.weight")
    torch.save(state | {"encoder.final_layer_norm.weight": norm[1:]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights cannot be loaded"):
        load_t5(ref, GPT, "auto", CPU)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights lack 1 tensors, e\.g\. encoder\.final_layer_norm\.weight"):
        load_t5(ref, GPT, "auto", CPU)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not end a text with the end token"):
        load_t5(write(tmp_path, ends=False), GPT, "auto", CPU)


# --- padding -------------------------------------------------------------------------------------------------------


def test_padding_is_on_the_left_and_zero() -> None:
    features = torch.arange(6.0).reshape(3, 2) + 1
    padded, padding = pad_left(features, 5)
    assert padded.tolist() == [[0, 0], [0, 0], [1, 2], [3, 4], [5, 6]]
    assert padding.tolist() == [True, True, False, False, False]
    assert pad_left(features, 3)[1].tolist() == [False] * 3
    with pytest.raises(AssertionError):
        pad_left(features, 2)
