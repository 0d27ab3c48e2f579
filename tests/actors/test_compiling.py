"""What the pool asks of a pair's models: compiled now, later or never; captured, where there is a GPU."""

from __future__ import annotations

import pytest

from actors.compiling import compile_models
from configs.load import ConfigError
from configs.schema import Pool
from models.compiled import CompiledDecoder
from tests import toys


def test_models_are_compiled_when_the_pool_says_so() -> None:
    waits = {}
    for how in ("auto", "always", "never"):
        target = toys.target("llava")
        compile_models(Pool(compile=how, compile_after_s=7.0), [target])
        waits[how] = target._run._after_s if isinstance(target._run, CompiledDecoder) else None
    assert waits == {"auto": 7.0, "always": 0.0, "never": None}


def test_what_cannot_be_compiled_runs_uncompiled_unless_it_must_be() -> None:
    target = toys.target("llava")
    target.decoder.double()
    compile_models(Pool(), [target])
    assert target._run is None
    with pytest.raises(ConfigError, match=r"^pool\.compile: .*cannot be compiled"):
        compile_models(Pool(compile="always"), [target])


def test_capturing_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^pool\.capture: .* takes one CUDA device, and it is on cpu"):
        compile_models(Pool(capture=True), [toys.target("llava")])
