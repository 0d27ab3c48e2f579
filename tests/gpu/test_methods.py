"""Every method on a GPU against the oracles on the CPU: captured steps, asynchronous output, every family and mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding import Engine
from decoding.scheduling import replay
from decoding.scheduling.replay import StepRunner
from tests import toys
from tests.conformance import checks, images, methods
from tests.gpu.test_on_a_gpu import ON_GPU, waiting_is_an_error
from tests.toys.images import KINDS

pytestmark = pytest.mark.slow

IMAGE_CASES = [
    (method, kind, 4, mode)
    for index, method in enumerate(images.METHODS)
    for kind, mode in zip(KINDS, [*images.MODES, *images.MODES][index % 4 :], strict=False)
]


@pytest.fixture(autouse=True)
def full_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vision towers begin with a convolution, for which cuDNN uses TF32 unless it is switched off."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("case", methods.covering_cases(), ids=str)
def test_every_method_equals_the_oracle(device: str, case: methods.Case) -> None:
    with toys.on(device):
        methods.check_case(case)


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("method", list(methods.METHODS))
def test_replayed_steps_give_the_output_of_the_oracle(
    device: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, num_recorded = StepRunner._record, [0]

    def counted(self: StepRunner, *given: Any) -> Any:
        recording = record(self, *given)
        assert self.recorder is not None, "a recording failed"
        num_recorded[0] += 1
        return recording

    monkeypatch.setattr(replay, "NUM_LAUNCHED", 1)
    monkeypatch.setattr(StepRunner, "_record", counted)
    with toys.on(device):
        methods.check_case((method, methods.METHODS[method][1][0], 4, "greedy"), 12)
    assert num_recorded[0] > 0


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("case", IMAGE_CASES, ids=str)
def test_every_image_equals_the_slow_reference(device: str, case: methods.Case) -> None:
    with toys.on(device):
        images.check_equal(*case)


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize("mode", list(methods.MODES))
@pytest.mark.parametrize("method", list(methods.METHODS))
def test_a_step_of_any_method_never_waits_for_the_device(
    device: str, method: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, (family, *_) = methods.METHODS[method]
    wanted = checks.requests(family, 6, methods.MODES[mode], longest=16)
    # Replayed steps launch no kernels of their own.
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 0)
    run_step, calls = replay.run_step, []

    def watched(*given: Any) -> Any:
        calls.append(given)
        with waiting_is_an_error():
            return run_step(*given)

    with toys.on(device):
        decoder = Engine(toys.target(family), make(family), 4, 160)
        # Copies and captures of the first steps wait.
        checks.run(decoder, wanted)
        monkeypatch.setattr(replay, "run_step", watched)
        checks.run(decoder, wanted)
    assert calls
