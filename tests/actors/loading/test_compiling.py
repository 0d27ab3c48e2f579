"""`pool.compile` and `pool.capture`: which models of a pair are compiled or captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from actors.loading.loaded_pair import compile_models
from benchmarks.gpu.models import RunAgain
from configs.load import ConfigError
from configs.pool import PoolConfig
from models.backends.attention import DecoderRunner
from models.backends.cpu.compiled import CompiledDecoder
from models.backends.cuda.backend import CudaBackend
from models.backends.cuda.graphs import CapturedDecoder
from models.target import Target
from tests import toys


def compiled(pool: PoolConfig, *models: Target) -> list[bool]:
    compile_models(pool, models)
    return [isinstance(model._run, CompiledDecoder) for model in models]


def test_models_are_compiled_when_the_pool_enables_it() -> None:
    kernels = {how: compiled(PoolConfig(compile=how), toys.target("llava")) for how in ("auto", "always", "never")}
    assert kernels == {"auto": [False], "always": [True], "never": [False]}


def test_auto_follows_from_the_size_of_the_largest_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    small, size = (
        sum(parameter.numel() * parameter.element_size() for parameter in toys.target(name).decoder.parameters())
        for name in ("llava", "qwen2")
    )
    assert small < size
    for bound, expected in ((size, True), (size + 1, False)):
        monkeypatch.setattr("actors.loading.loaded_pair.MIN_COMPILED_BYTES", bound)
        assert compiled(PoolConfig(), toys.target("llava"), toys.target("qwen2")) == [expected] * 2
        assert compiled(PoolConfig(compile="never"), toys.target("qwen2")) == [False]


def test_a_model_that_cannot_be_compiled_runs_uncompiled_unless_compilation_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.loading.loaded_pair.MIN_COMPILED_BYTES", 0)
    target = toys.target("llava")
    target.decoder.double()
    assert compiled(PoolConfig(), target) == [False]
    with pytest.raises(ConfigError, match=r"^pool\.compile: .*cannot be compiled"):
        compile_models(PoolConfig(compile="always"), [target])


def test_capturing_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^pool\.capture: .* takes one CUDA device, and it is on cpu"):
        compile_models(PoolConfig(capture="always"), [toys.target("llava")])


class OnGpu(CudaBackend):
    """The CUDA backend without a GPU, whose recordings run again."""

    def capture(self, decoder: nn.Module, fuses: bool = False) -> DecoderRunner:
        """See `Backend.capture`."""
        return CapturedDecoder(decoder, RunAgain(), fuses, "eager")


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (PoolConfig(), "captured, fused"),
        (PoolConfig(compile="always"), "captured, fused"),
        (PoolConfig(compile="never"), "captured"),
        (PoolConfig(capture="always", compile="never"), "captured"),
        (PoolConfig(capture="never"), "eager"),
        (PoolConfig.model_validate({"capture": False}), "eager"),
        (PoolConfig.model_validate({"capture": True}), "captured, fused"),
    ],
)
def test_steps_on_a_gpu_are_captured_and_fused(
    pool: PoolConfig, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.loading.loaded_pair.MIN_COMPILED_BYTES", 0)
    target = toys.target("llava")
    monkeypatch.setattr("models.contract.backend_for", lambda _: OnGpu())
    compile_models(pool, [target])
    assert (DecoderRunner.mode if target._run is None else target._run.mode) == expected


def test_layers_that_cannot_be_fused_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    target = toys.target("llava")
    monkeypatch.setattr("models.contract.backend_for", lambda _: OnGpu())
    layers: Any = target.decoder.layers
    layers[1].register_buffer("scales", torch.ones(1))
    with pytest.raises(ConfigError, match=r"^pool\.compile: .*layers of one make"):
        compile_models(PoolConfig(compile="always"), [target])
    assert target._run is not None
    assert target._run.mode == "captured"
