"""Weights and KV caches beyond the memory of a GPU are refused; what cannot be known is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import ConfigError, load_job
from configs.schema import CaptionJobConfig
from pipeline.resources import machine, request_checks
from pipeline.resources.request_checks import check_memory, check_requests

ROOT = Path(__file__).resolve().parents[3]


def job(*overrides: str) -> CaptionJobConfig:
    models = [f"model.{name}.path={ROOT}/zoo/checkpoints/caption_{name}" for name in ("target", "drafter")]
    return load_job(CaptionJobConfig, "demo_folder", (*models, "pool.num_gpus=1", *overrides))


def test_weights_and_caches_are_compared_with_the_memory_of_the_largest_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_checks, "gpu_memory_bytes", lambda: [2**20, 2**30])
    check_memory(job(), runs_here=True)
    with pytest.raises(ConfigError, match=r"pool.slots: 4,096 slots of 512 tokens .* and 1 GPU of this"):
        check_memory(job("pool.slots=4096"), runs_here=True)
    check_memory(job("pool.slots=4096"), runs_here=False)
    monkeypatch.setattr(request_checks, "gpu_memory_bytes", lambda: [2**20])
    with pytest.raises(ConfigError, match=r"model.target.path: the weights need .* of this machine has 1.0 MiB"):
        check_memory(job("pool.num_gpus=0.5"), runs_here=True)
    check_memory(job("model.target.path=owner/name", "model.drafter.path=owner/other"), runs_here=True)
    monkeypatch.setattr(request_checks, "gpu_memory_bytes", list)
    check_memory(job("pool.slots=4096"), runs_here=True)


def test_fp8_and_lengths_per_row_are_accepted_where_they_can_be_had() -> None:
    check_requests(job("model.target.quantization=fp8"))
    check_requests(job("sampling.max_new_tokens=4000", "columns.max_new_tokens=n"))
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens: 512 tokens of output fill"):
        check_requests(job("sampling.max_new_tokens=512"))
    check_requests(job("sampling.max_new_tokens=511"))


def test_this_machine_has_memory() -> None:
    assert machine.memory_bytes() > 2**20
    assert all(size > 0 for size in machine.gpu_memory_bytes())
