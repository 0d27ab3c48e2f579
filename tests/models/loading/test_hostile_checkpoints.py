"""Checkpoints of strangers load no code, reach no network, and are refused by arithmetic before anything is built."""

from __future__ import annotations

import json
import os
import socket
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import modeling_utils

import actors.loading.pair
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from models.captioner import Captioner
from models.heads.files import fingerprint, head_folder, read_json, read_tensors
from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config, read_processor, revision_of
from models.loading.config_keys import KERNEL_METHODS, RULES
from models.loading.hub import offline
from models.loading.weight_headers import read_header, stored_weights
from models.target import Target
from tests import toys

KERNEL = "owner/kernel"


class Reached(BaseException):
    """Raised by everything that must not happen; no `except Exception` hides it."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each connection, each name lookup and each kernel of the hub an error that is not caught."""

    def reach(*_arguments: Any, **_options: Any) -> Any:
        raise Reached

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", reach)
    monkeypatch.setattr(socket, "getaddrinfo", reach)
    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", reach)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toys.save("llama", tmp_path)
    return tmp_path


@pytest.fixture
def visual(tmp_path: Path) -> Path:
    toys.save("llava", tmp_path)
    return tmp_path


def edit(folder: Path, file: str, **changes: Any) -> None:
    path = folder / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def edit_part(folder: Path, part: str, **changes: Any) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings[part] |= changes
    (folder / "config.json").write_text(json.dumps(settings))


def load(folder: Path) -> Target:
    return Target.load(CheckpointRef(str(folder)), "float32", "cpu")


def job_of(folder: Path) -> CaptionJobConfig:
    data = {
        "source": {"kind": "parquet", "path": "in"},
        "prompt": "Describe.",
        "model": {"target": {"path": str(folder), "dtype": "float32", "device": "cpu"}},
        "method": {"drafter": {"kind": "none"}},
        "sink": {"path": "out"},
    }
    return validate(CaptionJobConfig, data, "job.yaml")


def refusal(folder: Path) -> str:
    """Return the one sentence with which planning and loading refuse a checkpoint."""
    with pytest.raises(CheckpointError) as loaded:
        load(folder)
    with pytest.raises(ConfigError) as planned:
        actors.loading.pair.check(job_of(folder))
    message = str(loaded.value)
    assert message.startswith(f"{folder}: ")
    assert "\n" not in message
    assert len(message) < len(str(folder)) + 700
    assert str(planned.value) == f"model.target: {message}"
    return message.removeprefix(f"{folder}: ")


# --- keys that load code or reach a network ------------------------------------------------------------------------

ATTENTION = ("_attn_implementation", "attn_implementation", "_attn_implementation_internal")
EXPERTS = ("_experts_implementation", "experts_implementation", "_experts_implementation_internal")


@pytest.mark.parametrize(
    "value", [KERNEL, {"": KERNEL, "text_config": KERNEL, "vision_config": KERNEL}, "flash_attention_2"]
)
@pytest.mark.parametrize("key", [*ATTENTION, *EXPERTS])
def test_a_kernel_as_attention_or_experts_is_dropped(key: str, value: Any, folder: Path) -> None:
    edit(folder, "config.json", **{key: value})
    target = load(folder)
    assert target.model.config._attn_implementation == "sdpa"
    assert getattr(target.model.config, "_experts_implementation", None) != value
    actors.loading.pair.check(job_of(folder))


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
@pytest.mark.parametrize("key", [*ATTENTION, *EXPERTS])
def test_a_kernel_of_a_part_is_dropped(key: str, part: str, visual: Path) -> None:
    edit_part(visual, part, **{key: KERNEL})
    config: Any = load(visual).model.config
    assert {config._attn_implementation, config.text_config._attn_implementation} == {"sdpa"}
    assert config.vision_config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_kernels", True),
        ("kernel_config", {"kernel_mapping": {"RMSNorm": f"{KERNEL}:RMSNorm"}}),
        ("fusion_config", {"patch_embeddings": True}),
        ("use_pretrained_backbone", True),
        ("custom_pipelines", {"x": {"impl": "x.X"}}),
        ("trust_remote_code", True),
        (
            "auto_map",
            {"AutoConfig": "x.Config", "AutoModelForCausalLM": "owner/other--x.Model", "AutoTokenizer": "x.T"},
        ),
        ("_name_or_path", "owner/other"),
        ("_commit_hash", "0" * 40),
        ("base_model_name_or_path", "owner/other"),
    ],
)
def test_other_keys_are_dropped(key: str, value: Any, folder: Path) -> None:
    (folder / "x.py").write_text("raise SystemExit('remote code ran')")
    edit(folder, "config.json", **{key: value})
    config = load(folder).model.config
    assert getattr(config, key, None) != value
    assert type(config).__module__.startswith("transformers.")


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        *(("config.json", "quantization_config", {"quant_method": method}) for method in sorted(KERNEL_METHODS)),
        ("config.json", "backbone", "hf-hub:owner/name"),
        ("config.json", "backbone", "resnet50"),
        ("config.json", "architecture", "hf-hub:owner/name"),
        ("config.json", "model_args", {"checkpoint_path": "/tmp/x.bin"}),
        ("config.json", "model_args", {"pretrained_cfg": {"hf_hub_id": "owner/name"}}),
        ("config.json", "configuration_files", ["config.4.0.0.json"]),
        ("config.json", "transformers_weights", "../other/model.safetensors"),
        ("config.json", "transformers_weights", "pytorch_model.bin"),
        ("tokenizer_config.json", "gguf_file", "../other.gguf"),
        ("tokenizer_config.json", "vocab", "/dev/zero"),
        ("tokenizer_config.json", "merges", "/dev/zero"),
        ("tokenizer_config.json", "init_inputs", ["/dev/zero"]),
        ("tokenizer_config.json", "fast_tokenizer_files", ["tokenizer.4.0.0.json"]),
        ("processor_config.json", "audio_tokenizer", {"audio_tokenizer_class": "DacModel"}),
        ("audio_tokenizer_config.json", "audio_tokenizer_name_or_path", "owner/name"),
        ("preprocessor_config.json", "repo_path", "owner/name"),
        ("preprocessor_config.json", "class_info_file", "x.json"),
        ("preprocessor_config.json", "is_vqa", True),
        ("processor_config.json", "apply_ocr", True),
        ("adapter_config.json", "base_model_name_or_path", "owner/name"),
    ],
)
def test_a_key_that_cannot_be_dropped_is_refused_by_its_name(file: str, key: str, value: Any, folder: Path) -> None:
    edit(folder, file, **{key: value})
    message = refusal(folder)
    assert f"its {file} sets {key}" in message or f"it holds {file}: " in message


def test_a_tokenizer_in_a_folder_of_its_own_is_checked(folder: Path) -> None:
    (folder / "qformer_tokenizer").mkdir()
    edit(folder, "qformer_tokenizer/tokenizer_config.json", gguf_file="../other.gguf")
    assert "its tokenizer_config.json sets gguf_file" in refusal(folder)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_a_refused_key_is_found_in_parts_and_named_by_its_path(part: str, visual: Path) -> None:
    edit_part(visual, part, backbone="hf-hub:owner/name")
    assert f"its config.json sets {part}.backbone to" in refusal(visual)


def test_honest_values_of_listed_keys_are_accepted(folder: Path) -> None:
    honest = {"model_args": {"img_size": 448}, "architecture": "vit_base", "transformers_weights": "model.safetensors"}
    edit(folder, "config.json", **honest, backbone=None, quantization_config=None)
    edit(folder, "tokenizer_config.json", init_inputs=[], gguf_file=None)
    edit(folder, "preprocessor_config.json", is_vqa=False, apply_ocr=False)
    load(folder)


def test_every_rule_has_a_key_that_a_test_sets() -> None:
    text = Path(__file__).read_text()
    missing = [key for rule in RULES for key in rule.keys[:1] if f'"{key}"' not in text]
    assert missing == []


def test_an_unknown_architecture_in_a_part_runs_no_code(visual: Path) -> None:
    (visual / "x.py").write_text("raise SystemExit('remote code ran')")
    edit_part(visual, "text_config", model_type="frobnicator", auto_map={"AutoConfig": "x.C", "AutoModel": "x.M"})
    assert "its config.json cannot be read" in refusal(visual)


def test_code_of_a_tokenizer_is_not_run(folder: Path) -> None:
    (folder / "x.py").write_text("raise SystemExit('remote code ran')")
    edit(folder, "tokenizer_config.json", tokenizer_class="Frob", auto_map={"AutoTokenizer": ["x.T", "owner/o--x.T"]})
    assert refusal(folder) == "it contains custom code, which runs only with allow_remote_code: true"


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("preprocessor_config.json", {"image_processor_type": "OneFormerImageProcessor"}),
        ("processor_config.json", {"processor_class": "MgpstrProcessor"}),
        ("processor_config.json", {"processor_class": "BarkProcessor"}),
        ("tokenizer_config.json", {"tokenizer_class": "RagTokenizer"}),
        ("tokenizer_config.json", {"processor_class": "MgpstrProcessor"}),
    ],
)
def test_classes_that_fetch_files_fail_without_a_connection(file: str, changes: dict[str, str], visual: Path) -> None:
    edit(visual, file, **changes)
    ref = CheckpointRef(str(visual))
    with suppress(CheckpointError):  # `alone` asserts that nothing is reached
        read_processor(ref, read_config(ref))


def test_captioners_and_processors_are_read_without_a_connection(visual: Path) -> None:
    edit(visual, "config.json", _attn_implementation=KERNEL)
    ref = CheckpointRef(str(visual))
    captioner = Captioner.load(ref, "<image>", "float32", "cpu", 1, 2)
    assert captioner.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert not constants.HF_HUB_OFFLINE


def test_the_guard_ends_with_its_context() -> None:
    with offline():
        assert huggingface_hub.is_offline_mode()
        with pytest.raises(Exception, match="offline mode is enabled"):
            huggingface_hub.HfApi().model_info("owner/name")
    assert not huggingface_hub.is_offline_mode()
    with pytest.raises(Reached):
        huggingface_hub.HfApi().model_info("owner/name")


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_hidden_layers", 1_000_000, "asks for 1,000,000 layers, and its weights have 21 tensors"),
        ("num_hidden_layers", 10**15, "layers"),
        ("num_hidden_layers", 1e9, "layers"),
        ("num_attention_heads", 10**9, "num_attention_heads to 1,000,000,000"),
        ("num_key_value_heads", 10**6, "num_key_value_heads"),
        ("hidden_size", 10**12, "hidden_size"),
        ("hidden_size", 2**25, "parameters or more"),
        ("intermediate_size", 2**25, "parameters or more"),
        ("vocab_size", 10**10, "vocab_size"),
        ("vocab_size", 2**22, "parameters or more"),
        ("head_dim", 10**9, "head_dim"),
        ("max_position_embeddings", 10**12, "max_position_embeddings"),
        ("num_experts", 10**9, "num_experts"),
        ("num_labels", 10**9, "num_labels"),
        ("anything", 10**40, "anything"),
    ],
)
def test_a_size_that_the_weights_cannot_fill_is_refused_by_its_name(
    key: str, value: Any, reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder, "config.json", **{key: value})
    monkeypatch.setattr("models.loading.checkpoints._config_of", lambda *_: pytest.fail("transformers was asked"))
    assert reason in refusal(folder)


def test_a_size_of_a_part_is_refused_by_its_path(visual: Path) -> None:
    edit_part(visual, "vision_config", num_hidden_layers=1_000_000)
    assert "asks for 1,000,000 layers in vision_config" in refusal(visual)


def test_without_weights_fixed_limits_hold(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    edit(folder, "config.json", num_hidden_layers=1_000_000)
    assert "sets num_hidden_layers to 1,000,000, and at most 1,024 layers are possible" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("tokenizer_config.json", {"extra_ids": 10**9}, "extra_ids to 1,000,000,000"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 30: {"content": "x"}}}, "the token id 9999"),
        ("added_tokens.json", {"x": 2**24}, "the token id 16777216"),
        ("preprocessor_config.json", {"size": {"height": 10**6, "width": 1}}, "size.height to 1,000,000"),
        ("preprocessor_config.json", {"max_pixels": 10**12}, "max_pixels"),
        ("processor_config.json", {"num_additional_image_tokens": 10**10}, "num_additional_image_tokens"),
        ("processor_config.json", {"image_seq_length": 10**9}, "image_seq_length"),
        ("processor_config.json", {"image_processor": {"size": 10**9}}, "image_processor.size"),
    ],
)
def test_absurd_sizes_of_tokenizers_and_processors_are_refused(
    file: str, changes: dict[str, Any], reason: str, folder: Path
) -> None:
    edit(folder, file, **changes)
    assert reason in refusal(folder)


# --- JSON ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested more than 64 levels deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 levels deep"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": NaN}', "the value NaN"),
        ('{"a": [Infinity]}', "the value Infinity"),
        ('{"a": 1e999}', "1e999"),
        ('{"a": ' + "9" * 5000 + "}", "4300 digits"),
        ("[" + "1," * 1_000_001 + "1]", "more than 1,000,000 values"),
        ("{", "not valid JSON"),
        ("[]", "no JSON object"),
        ("\ufeff{}", "JSON"),
        ("", "not valid JSON"),
    ],
    ids=[
        "depth",
        "65 levels",
        "twice",
        "NaN",
        "infinity",
        "range",
        "digits",
        "values",
        "torn",
        "list",
        "mark",
        "empty",
    ],
)
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_json_that_is_not_strict_is_refused_in_one_sentence(file: str, text: str, reason: str, folder: Path) -> None:
    (folder / file).write_text(text)
    message = refusal(folder)
    assert f"its {file} cannot be read: " in message
    assert reason in message


@pytest.mark.parametrize(
    ("file", "num_bytes"),
    [("config.json", 16 * 1024**2 + 1), ("tokenizer.json", 128 * 1024**2 + 1), ("chat_template.jinja", 10**11)],
)
def test_files_that_are_too_large_are_not_read(file: str, num_bytes: int, folder: Path) -> None:
    with (folder / file).open("ab") as stream:
        stream.truncate(num_bytes)
    assert f"its {file} has {num_bytes:,} bytes" in refusal(folder)


def test_a_tokenizer_with_too_many_values_is_refused_before_it_is_parsed(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"added_tokens": [' + "[]," * 8_000_001 + "[]]}")
    assert "its tokenizer.json cannot be read: it has more than 8,000,000 values" in refusal(folder)


# --- files that are not regular ------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def process_file(path: Path) -> None:
    path.symlink_to("/proc/self/environ")


def directory(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(path.parent)
        listener.bind(path.name)


KINDS: list[Callable[[Path], None]] = [fifo, device, process_file, directory, unix_socket]
FILES = (
    *(
        "config.json",
        "model.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "generation_config.json",
    ),
    *("chat_template.jinja", "tokenizer.model", "merges.txt", "other.json", "pytorch_model.bin", "x.index.json"),
    *("additional_chat_templates/tool.jinja",),
)


@pytest.mark.parametrize(
    ("file", "kind"), [*((file, fifo) for file in FILES), *(("config.json", kind) for kind in KINDS[1:])]
)
def test_a_file_that_is_not_regular_is_refused_without_waiting(
    file: str, kind: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).unlink(missing_ok=True)
    kind(folder / file)
    message = refusal(folder)
    assert f"its {Path(file).name} cannot be read: " in message
    assert message.endswith(("it is no regular file", "Is a directory"))


@pytest.mark.parametrize("kind", [fifo, device, process_file], ids=["fifo", "device", "proc"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"])
def test_files_of_heads_that_are_not_regular_are_refused(
    file: str, kind: Callable[[Path], None], tmp_path: Path
) -> None:
    ref = CheckpointRef(str(tmp_path))
    kind(tmp_path / file)
    attempts: list[Callable[[], Any]] = [lambda: head_folder(ref, ("model.safetensors",))]
    attempts.append(lambda: fingerprint(tmp_path, ref))
    attempts.append(lambda: read_json(tmp_path) if file == "config.json" else read_tensors(tmp_path / file))
    for attempt in attempts:
        with pytest.raises((CheckpointError, OSError), match="regular"):
            attempt()


def test_links_to_regular_files_are_followed_as_in_the_cache_of_the_hub(folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in [path for path in folder.iterdir() if path.is_file()]:
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)
    load(folder)


# --- headers of weights --------------------------------------------------------------------------------------------


def write_header(file: Path, header: bytes | dict[str, Any], num_bytes: int = 0) -> None:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(data)) + data)
        stream.truncate(8 + len(data) + num_bytes)


def tensor(shape: list[Any], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HEADERS: dict[str, tuple[bytes | dict[str, Any], int, str]] = {
    "a shape that overflows": ({"a": tensor([2**40, 2**40], 0, 8)}, 8, "not the size of its shape"),
    "a negative size": ({"a": tensor([-1, -8], 0, 32)}, 32, "no list of sizes"),
    "offsets beyond the file": ({"a": tensor([4], 0, 16), "b": tensor([2**60], 16, 16 + 2**62)}, 16, "asks for"),
    "a hole": ({"a": tensor([4], 0, 16), "b": tensor([4], 32, 48)}, 48, "do not begin where"),
    "an overlap": ({"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)}, 16, "do not begin where"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, 4, "no dtype, shape and offsets"),
    "a size as text": ({"a": tensor(["4"], 0, 16)}, 16, "no list of sizes"),
    "a name twice": (b'{"a":1,"a":1}', 0, "the key 'a' twice"),
    "depth": (b'{"a":' + b"[" * 100_000, 0, "nested"),
    "no object": (b"[]", 0, "no JSON object"),
}


@pytest.mark.parametrize(("header", "num_bytes", "reason"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_disagrees_with_its_file_is_refused(
    header: bytes | dict[str, Any], num_bytes: int, reason: str, folder: Path
) -> None:
    write_header(folder / "model.safetensors", header, num_bytes)
    message = refusal(folder)
    assert message.startswith("model.safetensors is torn or not safetensors (")
    assert reason in message


def test_a_header_of_more_tensors_than_weights_is_refused_before_it_is_parsed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.loading.weight_headers.parse_object", lambda *_: pytest.fail("the header was parsed"))
    entry = b'"t%07d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]},'
    names = b"".join(entry % (index, 4 * index, 4 * index + 4) for index in range(500_000))
    write_header(folder / "model.safetensors", b"{" + names[:-1] + b"}", 2_000_000)
    assert "bytes for 2,000,000 bytes of weights" in refusal(folder)
    write_header(folder / "model.safetensors", b"{" + names[:-1] + b"}", 200_000_000)
    assert "its header names more than 400,000 tensors" in refusal(folder)


def test_a_header_as_long_as_its_length_allows_is_not_read(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 2**62))
        stream.truncate(10**12)
    assert "torn or not safetensors" in refusal(folder)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 10**9))
        stream.truncate(10**12)
    assert "its header has 1,000,000,000 bytes, and at most 100,000,000 are read" in refusal(folder)


def test_an_index_of_millions_of_entries_is_refused(folder: Path) -> None:
    entries = ",".join(f'"t{index}":"model.safetensors"' for index in range(900_000))
    (folder / "model.safetensors.index.json").write_text('{"weight_map":{' + entries + "}}")
    assert "model.safetensors.index.json is damaged" in refusal(folder)


def test_headers_read_the_shapes_that_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.tensor(1.0),
        "d": torch.ones(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "model.safetensors")
    assert {name: (tensor.shape, tensor.num_bytes) for name, tensor in header.items()} == {
        name: (tuple(value.shape), value.nbytes) for name, value in tensors.items()
    }
    stored = stored_weights(tmp_path)
    assert stored is not None
    assert (stored.num_tensors, stored.num_elements, stored.num_bytes) == (4, 12, 38)


def test_a_pickled_head_whose_tensors_repeat_one_value_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(2**40)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="repeat values of a small file"):
        read_tensors(tmp_path / "medusa_lm_head.pt", device="meta")


def test_a_pickled_head_that_is_compressed_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    assert read_tensors(tmp_path / "stored.pt")["a"].shape == (1000,)
    with pytest.raises(CheckpointError, match="its members are compressed"):
        read_tensors(tmp_path / "packed.pt")


# --- the hub -------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of `owner/name` in a cache of the hub, from which nothing else can be had."""
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    toys.save("llama", snapshot)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_repository_of_the_hub_is_checked_like_a_folder(cached: Path) -> None:
    ref = CheckpointRef("owner/name")
    edit(cached, "config.json", _attn_implementation=KERNEL)
    target = Target.load(ref, "float32", "cpu")
    assert target.model.config._attn_implementation == "sdpa"
    assert (target.name, target.model.config.name_or_path) == ("owner/name", "owner/name")
    assert revision_of(ref, read_config(ref)) == COMMIT
    edit(cached, "config.json", backbone="hf-hub:owner/other")
    with pytest.raises(CheckpointError, match=r"^owner/name: its config\.json sets backbone"):
        read_config(ref)
    (cached / "config.json").unlink()
    os.mkfifo(cached / "config.json")
    with pytest.raises(CheckpointError, match=r"^owner/name: its config\.json cannot be read: it is no regular file"):
        read_config(ref)


def test_shards_of_the_hub_are_those_of_the_index(cached: Path) -> None:
    (cached / "model.safetensors").rename(cached / "model-00001-of-00001.safetensors")
    names = toys.oracle("llama").state_dict()
    index: dict[str, Any] = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (cached / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Target.load(CheckpointRef("owner/name", COMMIT), "float32", "cpu").vocab_size == toys.VOCAB_SIZE
    index["weight_map"]["lm_head.weight"] = "../../other.safetensors"
    (cached / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is no plain file name"):
        Target.load(CheckpointRef("owner/name"), "float32", "cpu")


def test_a_repository_that_is_not_cached_is_refused_by_its_name(cached: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^owner/other: it cannot be fetched from the hub: "):
        read_config(CheckpointRef("owner/other"))
