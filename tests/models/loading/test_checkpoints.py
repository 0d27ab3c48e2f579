"""An unusable checkpoint is refused with one sentence that names its path and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config, revision_of
from models.target import Target
from tests import toys


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


def config_is_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_is_torn(folder: Path) -> None:
    cut(folder / "config.json", 20)


def config_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_names_no_architecture(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "model_type"}))


def config_holds_words_for_numbers(folder: Path) -> None:
    edit_config(folder, hidden_size="wide")


def architecture_is_unknown(folder: Path) -> None:
    edit_config(folder, model_type="frobnicator")


def architecture_writes_no_text(folder: Path) -> None:
    edit_config(folder, model_type="clip")


def code_of_its_own(folder: Path) -> None:
    edit_config(folder, model_type="frobnicator", auto_map={"AutoConfig": "frobnicator.Config"})
    (folder / "frobnicator.py").write_text("raise SystemExit('remote code ran')")


def weights_are_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def weights_are_torn_at_the_end(folder: Path) -> None:
    file = folder / "model.safetensors"
    cut(file, file.stat().st_size - 100)


def weights_are_torn_in_the_header(folder: Path) -> None:
    cut(folder / "model.safetensors", 20)


def weights_are_empty(folder: Path) -> None:
    cut(folder / "model.safetensors", 0)


def weights_are_pickled(folder: Path) -> None:
    weights_are_missing(folder)
    torch.save(toys.oracle("llama").state_dict(), folder / "pytorch_model.bin")


def weights_lack_a_layer(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=3)


def weights_are_of_another_size(folder: Path) -> None:
    edit_config(folder, intermediate_size=96)


def a_shard_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = list(toys.oracle("llama").state_dict())
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def an_index_names_a_path(folder: Path) -> None:
    a_shard_is_missing(folder)
    (folder / "model-00002-of-00002.safetensors").touch()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "../other/model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def an_index_is_torn(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [')


def tokenizer_is_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def tokenizer_is_torn(folder: Path) -> None:
    cut(folder / "tokenizer.json", 200)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (config_is_missing, "it holds no config.json, so it is not what save_pretrained writes"),
    (config_is_torn, "its config.json cannot be read: "),
    (config_is_a_list, "its config.json cannot be read: it is no JSON object"),
    (config_names_no_architecture, "its config.json has no model_type"),
    (config_holds_words_for_numbers, "its config.json cannot be read: "),
    (architecture_is_unknown, "does not know its architecture 'frobnicator'"),
    (architecture_writes_no_text, "its architecture 'clip' generates no text from text or images"),
    (code_of_its_own, "it contains custom code, which runs only with allow_remote_code: true"),
    (weights_are_missing, "it holds no .safetensors weights"),
    (weights_are_torn_at_the_end, "model.safetensors is torn or not safetensors"),
    (weights_are_torn_in_the_header, "model.safetensors is torn or not safetensors"),
    (weights_are_empty, "model.safetensors is torn or not safetensors"),
    (weights_are_pickled, "its weights are pickled (pytorch_model.bin)"),
    (weights_lack_a_layer, "its weights lack 9 tensors, e.g. model.layers.2."),
    (weights_are_of_another_size, "their shapes are not those that config.json asks for"),
    (a_shard_is_missing, "model-00002-of-00002.safetensors"),
    (
        an_index_names_a_path,
        "model.safetensors.index.json names '../other/model.safetensors', which is no plain file name",
    ),
    (an_index_is_torn, "model.safetensors.index.json is damaged"),
    (tokenizer_is_missing, "it holds no tokenizer"),
    (tokenizer_is_torn, "its processor cannot be read: "),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toys.save("llama", tmp_path)
    return tmp_path


def refusal(path: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        Target.load(CheckpointRef(path), "float32", "cpu")
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < len(path) + 200
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("damage", "sentence"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_checkpoint_is_refused_by_name(damage: Callable[[Path], None], sentence: str, folder: Path) -> None:
    damage(folder)
    assert sentence in refusal(str(folder))


def test_a_missing_image_processor_is_named(tmp_path: Path) -> None:
    toys.save("qwen2_5_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"its processor cannot be read: .*preprocessor_config\.json"):
        Target.load(CheckpointRef(str(tmp_path)), "float32", "cpu")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "~/nowhere", "two/many/parts", "x" * 300, "a\0b"])
def test_a_path_that_is_neither_folder_nor_hub_id_is_refused_without_asking_the_hub(name: str) -> None:
    assert refusal(name) == "no such folder (and not a hub id of the form owner/name)"


def test_an_absent_folder_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    assert refusal(str(tmp_path / "nowhere")).startswith("no such folder")


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(CheckpointError, match="an empty path: no such folder"):
        read_config(CheckpointRef(""))


def test_code_beside_a_known_architecture_is_not_run(folder: Path) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "frobnicator.Model"})
    (folder / "frobnicator.py").write_text("raise SystemExit('remote code ran')")
    assert type(Target.load(CheckpointRef(str(folder)), "float32", "cpu").model) is LlamaForCausalLM


def test_tied_output_embeddings_are_not_missing_weights(tmp_path: Path) -> None:
    config = toys.text_config()
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    toys.processor("llama").save_pretrained(tmp_path)
    loaded = Target.load(CheckpointRef(str(tmp_path)), "float32", "cpu")
    assert torch.equal(loaded.head.weight, loaded.decoder.get_input_embeddings().weight)


def test_the_revision_of_a_folder_follows_its_weights(folder: Path) -> None:
    ref = CheckpointRef(str(folder))
    config = read_config(ref)
    before = revision_of(ref, config)
    assert revision_of(ref, config) == before
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert revision_of(ref, config) != before
