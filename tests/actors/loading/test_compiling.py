"""`pool.compile` and `pool.capture`: which models of a pair are compiled or captured."""

from __future__ import annotations

import pytest

from actors.loading.loaded_pair import compile_models
from configs.load import ConfigError
from configs.pool import Pool
from models.backends.cpu.compiled import CompiledDecoder
from models.target import Target
from tests import toys


def compiled(pool: Pool, *models: Target) -> list[bool]:
    compile_models(pool, models)
    return [isinstance(model._run, CompiledDecoder) for model in models]


def test_models_are_compiled_when_the_pool_enables_it() -> None:
    found = {how: compiled(Pool(compile=how), toys.target("llava")) for how in ("auto", "always", "never")}
    assert found == {"auto": [False], "always": [True], "never": [False]}


def test_auto_follows_from_the_size_of_the_largest_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    small, size = (
        sum(one.numel() * one.element_size() for one in toys.target(name).decoder.parameters())
        for name in ("llava", "qwen2")
    )
    assert small < size
    for bound, expected in ((size, True), (size + 1, False)):
        monkeypatch.setattr("actors.loading.loaded_pair.MIN_COMPILED_BYTES", bound)
        assert compiled(Pool(), toys.target("llava"), toys.target("qwen2")) == [expected] * 2
        assert compiled(Pool(compile="never"), toys.target("qwen2")) == [False]


def test_what_cannot_be_compiled_runs_uncompiled_unless_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.loading.loaded_pair.MIN_COMPILED_BYTES", 0)
    target = toys.target("llava")
    target.decoder.double()
    assert compiled(Pool(), target) == [False]
    with pytest.raises(ConfigError, match=r"^pool\.compile: .*cannot be compiled"):
        compile_models(Pool(compile="always"), [target])


def test_capturing_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^pool\.capture: .* takes one CUDA device, and it is on cpu"):
        compile_models(Pool(capture=True), [toys.target("llava")])
