"""Rounded weights, int8 and fp8: what they become, and that decoding is lossless with respect to the rounded model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from actors.loading import pair
from configs.load import ConfigError
from configs.schema import CaptionJobConfig
from decoding import Engine, Method, Sampling
from decoding.acceptance import Exact
from decoding.contexts import Full
from decoding.contracts import TreePolicy
from decoding.drafters import ModelDrafter, NoDrafter
from decoding.trees import Chain, StaticTree, branching_paths
from models.backends.cpu.backend import CpuBackend
from models.backends.cpu.compiled import can_compile
from models.loading import quantization
from models.loading.quantization import FP8, KINDS, Fp8Linear, Int8Linear, RoundedLinear, quantise, why_not
from models.target import Target
from tests import toys
from tests.conformance import checks
from tests.covering import tiers

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "llava", "qwen2_5_vl")


def linear(weight: list[list[float]], bias: list[float] | None = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """A layer of 16 inputs, of which the first few have weights."""
    made = nn.Linear(16, len(weight), bias=bias is not None, dtype=dtype)
    with torch.no_grad():
        made.weight.zero_()
        made.weight[:, : len(weight[0])] = torch.tensor(weight)
        if bias is not None:
            made.bias.copy_(torch.tensor(bias))
    return made


def test_weights_are_rounded_to_int8_by_the_largest_weight_of_each_output() -> None:
    layer = Int8Linear(linear([[1.27, -0.5, 0.004, 0.006], [0.0, -254.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    assert layer.weight[:, :4].tolist() == [[127, -50, 0, 1], [0, -127, 2, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(layer.scales[:2], torch.tensor([0.01, 2.0]))
    assert layer.dequantised()[2].tolist() == [0.0] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_moves_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(64, 40, dtype=dtype)
    layer = Int8Linear(whole)
    steps = layer.scales.float()[:, None]
    # A scale that was rounded down leaves the largest weight a little beyond 127 steps.
    slack = 0.5 + 127 * torch.finfo(dtype).eps
    assert bool(((layer.dequantised() - whole.weight.float()).abs() <= slack * steps).all())


@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 5, 16), (0, 16)])
@pytest.mark.parametrize("bias", [None, [1.0, -2.0]])
def test_outputs_are_those_of_the_rounded_weights(shape: tuple[int, ...], bias: list[float] | None) -> None:
    layer = Int8Linear(linear([[0.3, -0.2], [1.0, 0.5]], bias))
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = inputs @ layer.dequantised().T + (0.0 if bias is None else torch.tensor(bias))
    torch.testing.assert_close(layer(inputs), expected)
    strided = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).T
    torch.testing.assert_close(layer(strided), strided @ layer.dequantised().T + (layer.bias if bias else 0.0))


def test_bfloat16_is_multiplied_as_exactly_as_it_can_be() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(256, 96, bias=False, dtype=torch.bfloat16))
    inputs = torch.randn(33, 256).to(torch.bfloat16)
    expected = inputs.float() @ layer.dequantised().T
    assert float((layer(inputs).float() - expected).abs().max() / expected.abs().max()) < 0.01


def test_a_nan_weight_stays_nan() -> None:
    made = linear([[1.0, 2.0]])
    with torch.no_grad():
        made.weight[0, 3] = torch.nan
    assert bool(Int8Linear(made)(torch.ones(1, 16)).isnan().all())


def test_layers_of_unsupported_widths_are_not_quantized() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16), nn.Sequential(nn.Linear(48, 4)))
    assert quantise(model, "int8") == 2
    assert [type(model[0]), type(model[1]), type(model[2][0])] == [Int8Linear, nn.Linear, Int8Linear]
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 32), nn.Linear(24, 32))
    assert quantise(model, "fp8") == 1
    assert [type(layer) for layer in model] == [nn.Linear, Fp8Linear, nn.Linear]


# --- fp8: inputs are rounded as well -------------------------------------------------------------------------------


def test_weights_are_rounded_to_fp8_by_the_largest_weight_of_each_output() -> None:
    layer = Fp8Linear(linear([[448.0, -224.0, 17.0, 1.06], [0.0, -1.75, 0.5, 0.0], *[[0.0] * 4] * 14]))
    # Between 16 and 32 fp8 has steps of 2, between 1 and 2 steps of an eighth; halves go to the even one.
    assert layer.weight.float()[0, :4].tolist() == [448.0, -224.0, 16.0, 1.0]
    assert layer.weight.float()[1, :4].tolist() == [0.0, -448.0, 128.0, 0.0]
    assert layer.scales[:2].tolist() == [1.0, 1.75 / 448]
    assert layer.dequantised()[2].tolist() == [0.0] * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_moves_by_more_than_half_a_step_of_fp8(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(64, 48, dtype=dtype)
    layer = Fp8Linear(whole)
    stored = whole.weight.float()
    # Three bits behind the leading one; below 2 ** -6 the steps are 2 ** -9.
    half = torch.maximum(stored.abs() * 2**-4, layer.scales[:, None] * 2**-10)
    assert bool(((layer.dequantised() - stored).abs() <= half * 1.0001).all())


class PlainFp8(nn.Module):
    """What `Fp8Linear` is to compute, in fp32 and step by step."""

    def __init__(self, layer: Fp8Linear) -> None:
        super().__init__()
        self.whole, self.bias = layer.dequantised(), layer.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scales = input.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / 448
        out = (input / scales).to(FP8).float() * scales @ self.whole.T
        return out if self.bias is None else out + self.bias


@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 5, 16), (0, 16)])
@pytest.mark.parametrize("bias", [None, [float(n) for n in range(16)]])
def test_outputs_of_fp8_are_those_of_rounded_weights_and_rounded_inputs(
    shape: tuple[int, ...], bias: list[float] | None
) -> None:
    layer = Fp8Linear(linear([[0.3, -0.2], [1.0, 0.5], *[[0.1, 0.7]] * 14], bias))
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(inputs), PlainFp8(layer)(inputs))
    strided = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).T
    torch.testing.assert_close(layer(strided), PlainFp8(layer)(strided))


def test_a_row_of_fp8_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    layer = Fp8Linear(nn.Linear(64, 32))
    row = torch.randn(1, 64)
    beside = [torch.cat([row, factor * torch.randn(5, 64)]) for factor in (1.0, 1e4, 0.0)]
    first = [layer(rows)[0] for rows in beside]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_fp8_stays_nan(value: float) -> None:
    layer = Fp8Linear(nn.Linear(32, 16))
    inputs = torch.ones(2, 32)
    inputs[0, 3] = value
    outputs = layer(inputs)
    assert bool(outputs[0].isnan().all())
    assert bool(outputs[1].isfinite().all())
    made = linear([[1.0, 2.0], *[[1.0, 1.0]] * 15])
    with torch.no_grad():
        made.weight[0, 3] = value
    outputs = Fp8Linear(made)(torch.ones(1, 16))[0]
    assert bool(outputs[0].isnan())
    assert bool(outputs[1:].isfinite().all())


# --- the rounded model is the target -------------------------------------------------------------------------------


def rounded_pair(family: str, rounding: str = "int8") -> tuple[Target, Any]:
    """The target with rounded weights, and transformers' model whose weights were replaced by the rounded ones; for
    fp8 its layers, too, by ones that round their inputs."""
    target = toys.target(family)
    oracle: Any = copy.deepcopy(toys.oracle(family))
    assert quantise(target.decoder, rounding) >= 14
    plain = oracle.get_decoder()
    with torch.no_grad():
        for name, module in target.decoder.named_modules():
            if isinstance(module, RoundedLinear):
                stored = plain.get_submodule(name)
                assert not torch.equal(stored.weight, module.dequantised())
                stored.weight.copy_(module.dequantised())
                if isinstance(module, Fp8Linear):
                    plain.set_submodule(name, PlainFp8(module))
    return target, oracle


def generate(oracle: Any, family: str, request: Any, eos_ids: frozenset[int]) -> tuple[int, ...]:
    inputs = toys.front_end(family).encode(request.prompt, request.images, request.videos)
    if getattr(getattr(oracle, "model", None), "rope_deltas", None) is not None:
        oracle.model.rope_deltas = None
    out = oracle.generate(
        **inputs, max_new_tokens=request.sampling.max_new_tokens, do_sample=False, eos_token_id=sorted(eos_ids)
    )
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


@tiers("family, kind, rounding", FAMILIES, ["plain", "chain", "tree"], KINDS)
def test_output_is_that_of_transformers_with_the_rounded_weights(family: str, kind: str, rounding: str) -> None:
    target, oracle = rounded_pair(family, rounding)
    drafter = NoDrafter() if kind == "plain" else ModelDrafter(toys.target(family), [Full()], toys.VOCAB_SIZE)
    tree: TreePolicy = StaticTree(branching_paths([2, 2])) if kind == "tree" else Chain(4)
    wanted = checks.requests(family, 6, longest=20)
    done = checks.run(Engine(target, Method(drafter, tree, Exact()), 3, 160), wanted)
    for request in wanted:
        assert done[request.sample_id].token_ids == generate(oracle, family, request, target.eos_ids), request.sample_id
    accepted = sum(completion.telemetry.num_accepted_draft_tokens for completion in done.values())
    assert (accepted > 0) == (kind != "plain")


@pytest.mark.parametrize("rounding", KINDS)
def test_sampled_output_with_drafts_is_that_without_them(rounding: str) -> None:
    target, _ = rounded_pair("llama", rounding)
    wanted = checks.requests("llama", 6, Sampling(temperature=0.9, top_k=20))
    results = []
    for drafter in (NoDrafter(), ModelDrafter(toys.target("llama"), [Full()], toys.VOCAB_SIZE)):
        done = checks.run(Engine(target, Method(drafter, Chain(4), Exact()), 3, 160), wanted)
        results.append({name: completion.token_ids for name, completion in done.items()})
    assert results[0] == results[1]


@pytest.mark.parametrize("rounding", KINDS)
def test_the_rounded_model_is_another_than_the_stored_one(rounding: str) -> None:
    target, _ = rounded_pair("llama", rounding)
    done = checks.run(
        Engine(target, Method(NoDrafter(), Chain(1), Exact()), 3, 160), checks.requests("llama", 12, longest=26)
    )
    stored = {r.sample_id: checks.generated("llama", r, target.eos_ids) for r in checks.requests("llama", 12)}
    assert any(done[name].token_ids != tokens for name, tokens in stored.items())


@pytest.mark.parametrize("rounding", KINDS)
def test_a_rounded_decoder_is_not_compiled(rounding: str) -> None:
    target, _ = rounded_pair("llama", rounding)
    assert not can_compile(target.decoder)
    assert not target.compile()


# --- jobs ----------------------------------------------------------------------------------------------------------


def job(
    folder: Path, dtype: str = "bfloat16", quantization: str = "int8", device: str = "cpu", **pool: Any
) -> CaptionJobConfig:
    if not folder.exists():
        folder.mkdir()
        toys.save("llama", folder)
    checkpoint = {"path": str(folder), "dtype": dtype, "device": device}
    data = {
        "source": {"kind": "images", "path": "in"},
        "prompt": "Describe.",
        "model": {"target": {**checkpoint, "quantization": quantization}, "drafter": checkpoint},
        "method": {"drafter": {"kind": "model"}},
        "pool": pool,
        "sink": {"path": "out"},
    }
    return CaptionJobConfig.model_validate_json(json.dumps(data))


def test_a_job_may_have_its_targets_weights_rounded_and_its_drafters_not(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    loaded, whole = pair.load(job(folder)), pair.load(job(folder, quantization="none"))
    kinds = {type(module) for module in loaded.target.decoder.modules()}
    assert Int8Linear in kinds
    assert nn.Linear not in kinds
    assert isinstance(loaded.drafter, Target)
    assert not any(isinstance(module, Int8Linear) for module in loaded.drafter.model.modules())
    assert type(loaded.target.head) is nn.Linear
    assert loaded.target.num_bytes < whole.target.num_bytes
    wanted = checks.requests("llama", 3)
    done = checks.run(loaded.engine(2), wanted)
    plain = checks.run(loaded.plain_engine(), wanted)
    assert all(len(done[name].token_ids) == len(plain[name].token_ids) > 0 for name in done)


def test_rounding_makes_another_job(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert job(folder).fingerprint({}) != job(folder, quantization="none").fingerprint({})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is then another")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_types_that_a_cpu_multiplies_slowly_are_refused(dtype: str, tmp_path: Path) -> None:
    reason = f"on a CPU torch has fast int8 kernels for bfloat16 only, not for {dtype}; set dtype bfloat16"
    with pytest.raises(ConfigError, match=rf"^model\.target: .*quantization: its weights cannot be int8: {reason}"):
        pair.load(job(tmp_path / "model", dtype, device="auto"))
    with pytest.raises(ValidationError, match=f"on a CPU takes the dtype bfloat16, and dtype is '{dtype}'"):
        job(tmp_path / "model", dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is then another")
def test_fp8_on_a_cpu_is_refused(tmp_path: Path) -> None:
    reason = "CPUs have no fp8 units; use int8"
    with pytest.raises(ConfigError, match=rf"^model\.target: .*quantization: its weights cannot be fp8: {reason}"):
        pair.load(job(tmp_path / "model", quantization="fp8", device="auto"))
    with pytest.raises(ValidationError, match="fp8 takes a GPU, and device is 'cpu'; on a CPU there is int8"):
        job(tmp_path / "model", quantization="fp8")


def test_a_job_with_fp8_loads_where_its_kernel_is_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "refuse_quantization", lambda *_: None)
    folder = tmp_path / "model"
    loaded = pair.load(job(folder, quantization="fp8", device="auto"))
    kinds = {type(module) for module in loaded.target.decoder.modules()}
    assert Fp8Linear in kinds
    assert nn.Linear not in kinds
    wanted = checks.requests("llama", 3)
    done = checks.run(loaded.engine(2), wanted)
    plain = checks.run(loaded.plain_engine(), wanted)
    assert all(len(done[name].token_ids) == len(plain[name].token_ids) > 0 for name in done)


def test_required_compilation_of_a_quantized_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValidationError, match=r"model\.target\.quantization is 'int8', and such weights are not compiled"
    ):
        job(tmp_path / "model", compile="always")


@pytest.mark.parametrize("rounding", KINDS)
def test_a_kernel_that_is_missing_or_wrong_is_found_out(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = KINDS[rounding]
    monkeypatch.setattr(CpuBackend, "refuse_quantization", lambda *_: None)
    assert why_not(CPU, torch.bfloat16, rounding) is None
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, input: forward(self, input) + 1.0)
    assert "is wrong with bfloat16 on cpu" in str(why_not(CPU, torch.bfloat16, rounding))

    def missing(*_: Any) -> Any:
        raise NotImplementedError("Could not run it\nwith a long story")

    monkeypatch.setattr(kind, "forward", missing)
    assert "has no kernel for them with bfloat16 on cpu (Could not run it)" in str(
        why_not(CPU, torch.bfloat16, rounding)
    )


def test_a_model_without_a_layer_to_round_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "BLOCK", 1024)
    monkeypatch.setattr("models.loading.checkpoints.why_not", lambda *_: None)
    with pytest.raises(ConfigError, match="none of its layers is a plain linear one"):
        pair.load(job(tmp_path / "model"))
