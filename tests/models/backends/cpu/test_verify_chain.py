"""When chains are verified by the native library; `tests/models/backends/test_equality.py` compares the results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.backends.cpu import attention, verify_chain
from models.backends.cpu.build import Library
from models.backends.cpu.verify_chain import can_walk
from tests import toys


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    assert attention.LIBRARY.library() is not None
    assert can_walk(torch.zeros(1, 2, 5))


def test_other_logits_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_walk(torch.zeros(1, 2, 5, dtype=torch.bfloat16))
    assert not can_walk(torch.zeros(1, 5, 2).transpose(1, 2))
    monkeypatch.setattr(attention, "LIBRARY", Library((), {}, "never tried"))
    assert not can_walk(torch.zeros(1, 2, 5))


def test_without_a_compiler_torch_walks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("this is no program\n")
    broken = Library((tmp_path / "broken.cpp",), {"walk_line": []}, "drafts are compared by torch's own operations")
    monkeypatch.setattr(verify_chain, "LIBRARY", broken)
    assert not can_walk(torch.zeros(1, 2, toys.VOCAB_SIZE))
    assert "compared by torch's own operations" in caplog.text
