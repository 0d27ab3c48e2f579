"""LoRA adapters merged at load: every weight equals a merge by hand, and what is not merged is refused by its name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.loading import pair
from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig
from decoding import Engine, Method, Request, Sampling
from decoding.acceptance import Exact
from models.loading.adapters import read_adapter
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.target import Target
from tests import toys
from tests.actors.fakes import fake_job
from tests.conformance import checks

RANK, ALPHA = 3, 8
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.05,
    "bias": "none",
    "target_modules": ["q_proj", "down_proj"],
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
}
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    toys.save("llama", folder)
    return folder


def weights_of(folder: Path, dtype: str = "float32", adapter: Path | None = None) -> dict[str, Tensor]:
    target = Target.load(CheckpointRef(str(folder)), dtype, "cpu", adapter=None if adapter is None else str(adapter))
    return dict(target.model.named_parameters())


def factors(shape: torch.Size, rank: int = RANK, seed: int = 0) -> tuple[Tensor, Tensor]:
    rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, columns, generator=generator), 0.1 * torch.randn(rows, rank, generator=generator)


def write(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | changes))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def lora(
    weights: dict[str, Tensor], modules: tuple[str, ...], ranks: dict[str, int] | None = None
) -> dict[str, Tensor]:
    tensors = {}
    for index, name in enumerate(modules):
        a, b = factors(weights[f"{name}.weight"].shape, (ranks or {}).get(name, RANK), index)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    return tensors


def check_merged(folder: Path, adapter: Path, scales: dict[str, float], dtype: str = "float32") -> None:
    """Every weight is that of the base, and of the modules in `scales` W + s · B A, summed element by element."""
    before, after = weights_of(folder, dtype), weights_of(folder, dtype, adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    num_changed = 0
    for name, weight in after.items():
        module = name.removesuffix(".weight")
        expected = before[name].clone()
        if module in scales:
            a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
            delta = torch.einsum("or,ri->oi", b, a) * scales[module]
            expected = before[name] + delta.to(weight.dtype)
            num_changed += 1
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6 if dtype == "float32" else 2e-2, msg=name)
    assert num_changed == len(scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_equals_a_merge_by_hand(base: Path, tmp_path: Path, dtype: str) -> None:
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS))
    check_merged(base, adapter, dict.fromkeys(LAYERS, ALPHA / RANK), dtype)


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_its_rank(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS), use_rslora=True)
    check_merged(base, adapter, dict.fromkeys(LAYERS, ALPHA / math.sqrt(RANK)))


def test_patterns_give_modules_ranks_and_scales_of_their_own(base: Path, tmp_path: Path) -> None:
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 5}, "alpha_pattern": {"down_proj": 2}}
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS, {LAYERS[1]: 5}), **patterns)
    check_merged(base, adapter, {LAYERS[0]: ALPHA / RANK, LAYERS[1]: ALPHA / 5, LAYERS[2]: 2 / RANK})


def test_target_modules_may_be_a_pattern_or_all_linear_layers(base: Path, tmp_path: Path) -> None:
    tensors = lora(weights_of(base), LAYERS)
    for number, targets in enumerate((r"model\.layers\.\d\.(self_attn|mlp)\.(q|down)_proj", "all-linear")):
        adapter = write(tmp_path / f"{number}", tensors, target_modules=targets)
        check_merged(base, adapter, dict.fromkeys(LAYERS, ALPHA / RANK))


def test_saved_modules_replace_those_of_the_model_and_embeddings_are_merged(base: Path, tmp_path: Path) -> None:
    before = weights_of(base)
    saved = torch.randn(before["lm_head.weight"].shape)
    vocab, width = before["model.embed_tokens.weight"].shape
    a, b = torch.randn(RANK, vocab), torch.randn(width, RANK)
    tensors = {
        "base_model.model.lm_head.weight": saved,
        "base_model.model.model.embed_tokens.lora_embedding_A": a,
        "base_model.model.model.embed_tokens.lora_embedding_B": b,
    }
    adapter = write(tmp_path / "a", tensors, target_modules=["embed_tokens"], modules_to_save=["lm_head"])
    after = weights_of(base, adapter=adapter)
    assert torch.equal(after["lm_head.weight"], saved)
    expected = before["model.embed_tokens.weight"] + torch.einsum("dr,rv->vd", b, a) * ALPHA / RANK
    torch.testing.assert_close(after["model.embed_tokens.weight"], expected, rtol=1e-5, atol=1e-5)


def test_layers_are_found_by_the_names_that_earlier_versions_gave_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    toys.save("llava", base)
    name = "model.language_model.layers.1.self_attn.q_proj"
    before = weights_of(base)
    a, b = factors(before[f"{name}.weight"].shape)
    for number, earlier in enumerate(("language_model.model.layers.1.self_attn.q_proj", name)):
        tensors = {f"base_model.model.{earlier}.lora_{side}.weight": value for side, value in (("A", a), ("B", b))}
        after = weights_of(base, adapter=write(tmp_path / f"{number}", tensors))
        changed = [key for key, weight in after.items() if not torch.equal(weight, before[key])]
        assert changed == [f"{name}.weight"]
        torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] + (b @ a) * ALPHA / RANK)


def test_texts_are_those_of_generate_with_the_merged_weights(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS))
    target = Target.load(CheckpointRef(str(base)), "float32", "cpu", adapter=str(adapter))
    oracle = toys.FAMILIES["llama"].model(0)
    own = {name: weight.clone() for name, weight in oracle.state_dict().items()}
    for name in LAYERS:
        a, b = factors(own[f"{name}.weight"].shape, RANK, LAYERS.index(name))
        own[f"{name}.weight"] += ALPHA / RANK * (b @ a)
    request = Request("a", toys.prompt("llama", 3)[0], (), Sampling(max_new_tokens=12, ignore_eos=True))
    method = Method(checks.make_drafter("none", "llama"), checks.TREES["chain"](), Exact())
    [done] = Engine(target, method, 1, 96).run([request])
    inputs = toys.front_end("llama").encode(request.prompt, ())
    merged = type(oracle)(oracle.config).eval()
    merged.load_state_dict(own)
    out = merged.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert list(done.token_ids) == out[0, inputs["input_ids"].shape[1] :].tolist()
    assert done.token_ids != checks.generated("llama", request, frozenset())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config\.json: peft_type: 'IA3' is not supported"),
        ({"use_dora": True}, r"use_dora: True is not supported by the merge"),
        ({"bias": "lora_only"}, r"bias: 'lora_only' is not supported: only weights are merged"),
        ({"fan_in_fan_out": True}, r"fan_in_fan_out: True is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights: 'pissa_niter_4' changes the base model"),
        ({"target_parameters": ["experts.w1"]}, r"target_parameters: \['experts\.w1'\] is not supported"),
        ({"of_a_later_version": 3}, r"of_a_later_version: 3 is not supported"),
        ({"r": 0}, r"r: 0 is no number of a LoRA adapter"),
        ({"target_modules": ["k_proj"]}, r"target_modules: they do not name model\.layers\.0\.self_attn\.q_proj"),
        ({"r": 4}, r"lora_A\.weight has the shape \[3, \d+\], and the model and .* ask for \[4, \d+\]"),
    ],
)
def test_what_is_not_merged_is_refused_by_its_key(
    base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS), **changes)
    with pytest.raises(CheckpointError, match=message):
        weights_of(base, adapter=adapter)


def test_files_that_are_absent_pickled_or_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS))
    with pytest.raises(CheckpointError, match=r"no such folder; download the adapter"):
        read_adapter(str(tmp_path / "absent"))
    tensors = lora(weights_of(base), LAYERS[:1])
    renamed = {name.replace("layers.0", "layers.9"): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"the model has no module model\.layers\.9\.self_attn\.q_proj"):
        weights_of(base, adapter=write(tmp_path / "b", renamed))
    half = {name: tensor for name, tensor in tensors.items() if "lora_A" in name}
    with pytest.raises(CheckpointError, match=r"has .*lora_A\.weight alone"):
        read_adapter(str(write(tmp_path / "c", half)))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is neither a low-rank matrix nor of modules_to_save"):
        read_adapter(str(write(tmp_path / "d", {"base_model.model.lm_head.weight": torch.zeros(2, 2)})))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"its weights are pickled \(adapter_model\.bin\).*save_pretrained"):
        read_adapter(str(adapter))
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not JSON"):
        read_adapter(str(adapter))


def job(base: Path, adapter: Path | None, **model: Any) -> CaptionJobConfig:
    target = {"path": str(base), "dtype": "float32", "device": "cpu", "adapter": adapter and str(adapter)}
    return fake_job(model={"target": target, **model}, method={"drafter": {"kind": "none"}})


def test_a_job_records_the_adapter_and_refuses_one_before_weights_are_read(base: Path, tmp_path: Path) -> None:
    bare = job(base, None)
    assert "adapter" not in bare.content({})["model"]["target"]
    assert pair.check(bare).revisions.keys() == {"target"}
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS))
    first = pair.check(job(base, adapter))
    digest = first.revisions["target_adapter"]
    assert first.target_id.endswith(f"+{adapter}@{digest}")
    write(tmp_path / "a", lora(weights_of(base), LAYERS[:2]))
    assert pair.check(job(base, adapter)).revisions["target_adapter"] != digest
    write(tmp_path / "a", lora(weights_of(base), LAYERS), r=4)
    with pytest.raises(ConfigError, match=r"^model\.target\.adapter: .*has the shape"):
        pair.check(job(base, adapter))


def test_a_shared_weight_is_not_merged(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    model = toys.FAMILIES["llama"].model(0)
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": True})
    tied = type(model)(config)
    tied.save_pretrained(base)
    toys.processor("llama").save_pretrained(base)
    tensors = {"base_model.model.lm_head.weight": torch.zeros(tied.lm_head.weight.shape)}
    adapter = write(tmp_path / "a", tensors, modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match=r"lm_head and model\.embed_tokens share one weight"):
        weights_of(base, adapter=adapter)


def test_a_drafter_that_is_a_model_takes_an_adapter_and_a_head_takes_none(base: Path, tmp_path: Path) -> None:
    adapter = write(tmp_path / "a", lora(weights_of(base), LAYERS))
    drafter = {"path": str(base), "dtype": "float32", "device": "cpu", "adapter": str(adapter)}
    data = job(base, None, drafter=drafter).resolved()
    own = validate(CaptionJobConfig, data | {"method": {"drafter": {"kind": "model"}}}, "a test")
    assert "drafter_adapter" in pair.check(own).revisions
    loaded = pair.load(own)
    assert isinstance(loaded.drafter, Target)
    name = f"{LAYERS[0]}.weight"
    assert not torch.equal(dict(loaded.drafter.model.named_parameters())[name], weights_of(base)[name])
    headed = validate(CaptionJobConfig, data | {"method": {"drafter": {"kind": "eagle"}}}, "a test")
    with pytest.raises(ConfigError, match=r"model\.drafter\.adapter: a head takes no adapter"):
        pair.check(headed)
