"""Files of ViSpec and MSD heads: public variants are read, and files that do not fit are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.heads.formats import EAGLE, FORMATS, MAX_QUERIES
from models.heads.loader import load_head, read_shape
from models.heads.vision import VisionKind, VispecNetwork
from models.loading.checkpoints import CheckpointError, CheckpointRef

RECORDED = Path(__file__).parent / "recorded"
CPU = torch.device("cpu")
NONE = torch.zeros(0, 0)
EMBEDDING = "embed_tokens.weight"


def changed(
    tmp_path: Path, case: str, config: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None
) -> CheckpointRef:
    """A copy of a case with other fields and tensors; None removes one."""
    folder = tmp_path / "head"
    shutil.copytree(RECORDED / case, folder)
    data = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({name: value for name, value in data.items() if value is not None}))
    weights = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: value for name, value in weights.items() if value is not None}, folder / "model.safetensors")
    return CheckpointRef(str(folder))


BAD_FILES: list[tuple[str, VisionKind, dict[str, Any], dict[str, Any], str]] = [
    ("vispec_qwen", "vispec", {}, {"img_fc.weight": None}, "img_fc.weight is missing"),
    ("vispec_qwen", "vispec", {}, {"imadpt.k_proj.bias": None}, "imadpt.k_proj.bias is missing"),
    ("vispec_llava", "vispec", {}, {"imadpt.k_proj.bias": torch.zeros(32)}, "imadpt.k_proj.bias is not known"),
    ("vispec_qwen", "vispec", {}, {"imadpt.q": None}, "no ViSpec head; MSD and EAGLE-1/2 heads"),
    ("vispec_qwen", "vispec", {}, {"imadpt.q": torch.zeros(2, 32)}, "must hold 1 to 256 queries"),
    ("vispec_qwen", "vispec", {}, {"imadpt.q": torch.zeros(0, 4, 8)}, "must hold 1 to 256 queries"),
    ("vispec_qwen", "vispec", {}, {"imadpt.q": torch.zeros(MAX_QUERIES + 1, 4, 8)}, "must hold 1 to 256 queries"),
    ("vispec_qwen", "vispec", {}, {"imadpt.q": torch.zeros(2, 8, 4)}, r"\[2, 8, 4\] instead of \[2, 4, 8\]"),
    ("vispec_qwen", "vispec", {}, {"imadpt.q": torch.full((2, 4, 8), torch.nan)}, "imadpt.q has values that are not"),
    ("vispec_qwen", "vispec", {}, {"fc.bias": torch.full((32,), torch.inf)}, "not finite; the file is damaged"),
    ("vispec_qwen", "vispec", {}, {"d2t": torch.zeros(9)}, "an EAGLE-3 head; set method.drafter.kind to eagle3"),
    ("vispec_qwen", "vispec", {"hidden_size": 64}, {}, r"instead of \[2, 4, 16\]|has shape"),
    ("vispec_qwen", "vispec", {"num_hidden_layers": 2}, {}, "has one layer, not 2"),
    (
        "vispec_qwen",
        "vispec",
        {"model_type": "llama"},
        {},
        "gives model_type 'llama'; there are ViSpec heads for llava",
    ),
    ("vispec_qwen", "vispec", {"model_type": None}, {}, "gives model_type None"),
    ("vispec_qwen", "msd", {}, {}, "this is a ViSpec head; set method.drafter.kind to vispec"),
    ("msd_llava", "vispec", {}, {}, "it has no imadpt.q, so it is no ViSpec head"),
    ("msd_llava", "msd", {"model_type": "qwen2_vl"}, {}, "layers.0.input_layernorm.weight is missing|bias is missing"),
    ("msd_qwen", "msd", {"model_type": "llava"}, {}, "input_layernorm.weight is not known|bias is not known"),
    (
        "msd_qwen",
        "msd",
        {},
        {"fc.weight": torch.zeros(32, 96)},
        r"fc.weight has shape \[32, 96\] instead of \[32, 64\]",
    ),
    ("msd_qwen", "msd", {"vocab_size": "64"}, {}, "must give vocab_size as a positive whole number"),
]


@pytest.mark.parametrize(("case", "kind", "config", "tensors", "message"), BAD_FILES)
def test_a_bad_file_is_refused_by_both_readers(
    tmp_path: Path, case: str, kind: VisionKind, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    ref = changed(tmp_path, case, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        read_shape(FORMATS[kind], ref)
    with pytest.raises(CheckpointError, match=message):
        load_head(FORMATS[kind], ref, "float32", CPU, 0, NONE)


def test_the_reader_of_eagle_names_the_kind_of_a_vispec_head() -> None:
    ref = CheckpointRef(str(RECORDED / "vispec_llava"))
    with pytest.raises(CheckpointError, match=r"this is a ViSpec head; set method\.drafter\.kind to vispec"):
        read_shape(EAGLE, ref)
    with pytest.raises(CheckpointError, match="this is a ViSpec head"):
        load_head(EAGLE, ref, "float32", CPU)


def test_the_number_of_queries_follows_from_the_tensor(tmp_path: Path) -> None:
    ref = changed(tmp_path, "vispec_llava", tensors={"imadpt.q": torch.ones(MAX_QUERIES, 4, 8)})
    assert read_shape(FORMATS["vispec"], ref).model_type == "llava_next"
    network = load_head(FORMATS["vispec"], ref, "float32", CPU, 0, NONE)
    assert isinstance(network, VispecNetwork)
    assert network.imadpt.q.shape == (MAX_QUERIES, 4, 8)


@pytest.mark.parametrize(
    ("model_type", "fitting", "other"),
    [
        ("llava", "llava_next", "llava_onevision"),
        ("llava_next", "llava", "llama"),
        ("qwen2_vl", "qwen2_vl", "qwen2_5_vl"),
    ],
)
def test_a_head_is_for_the_targets_of_its_family(tmp_path: Path, model_type: str, fitting: str, other: str) -> None:
    case, kind = ("msd_qwen", "msd") if model_type == "qwen2_vl" else ("vispec_llava", "vispec")
    shape = read_shape(FORMATS[kind], changed(tmp_path, case, {"model_type": model_type}))  # type: ignore[arg-type]
    assert shape.is_for(model_type)
    assert shape.is_for(fitting)
    assert not shape.is_for(other)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_sections_of_rotary_axes_do_not_change_the_frequencies(tmp_path: Path, name: str) -> None:
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 5e4}
    ref = changed(tmp_path, "msd_qwen", {"rope_scaling": None, name: rope})
    network = load_head(FORMATS["msd"], ref, "float32", CPU, 0, NONE)
    plain = 5e4 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(network.rotary.inv_freq, plain)


@pytest.mark.parametrize(("case", "kind"), [("vispec_llava", "vispec"), ("msd_qwen", "msd")])
def test_a_file_without_an_embedding_uses_the_targets(tmp_path: Path, case: str, kind: VisionKind) -> None:
    given = load_file(RECORDED / case / "model.safetensors")[EMBEDDING]
    ref = changed(tmp_path, case, tensors={EMBEDDING: None})
    longer = torch.cat([given, torch.ones(3, 32)])
    network = load_head(FORMATS[kind], ref, "float32", CPU, 0, longer)
    assert torch.equal(network.embed_tokens.weight, given.float())
    for other in (given[:-1], given[:, :-1]):
        with pytest.raises(CheckpointError, match=r"no embed_tokens.weight, and the target's embedding of shape"):
            load_head(FORMATS[kind], ref, "float32", CPU, 0, other)


def test_pickled_files_are_read_and_their_code_is_not_run(tmp_path: Path) -> None:
    ref = changed(tmp_path, "msd_llava")
    folder, mark = Path(ref.path), tmp_path / "ran"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, folder / "pytorch_model.bin")
    network = load_head(FORMATS["msd"], ref, "auto", CPU, 0, NONE)
    assert torch.equal(network.fc.weight, weights["fc.weight"])
    assert network.fc.weight.dtype == weights["fc.weight"].dtype
    torch.save(weights | {"fc.weight": Payload(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="tensors only, no other pickled objects"):
        read_shape(FORMATS["msd"], ref)
    assert not mark.exists()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"MSD heads need their config.json"):
        read_shape(FORMATS["msd"], ref)


class Payload:
    """Pickles to a call that creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)
