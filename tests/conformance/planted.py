"""Planted faults: a check that passes must fail when its fault is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
Check = Callable[[], object]
Fault = tuple[Plant, Check]
CAUGHT = (AssertionError, IndexError, RuntimeError, ValueError)


def each(faults: Sequence[Fault]) -> pytest.MarkDecorator:
    """One test for each pair of a fault and the check that must find it."""
    names = [f"{index}-{fault.__name__}" for index, (fault, _) in enumerate(faults)]
    return pytest.mark.parametrize(("fault", "check"), faults, ids=names)


def assert_caught(fault: Plant, check: Check, caught: tuple[type[Exception], ...] = CAUGHT) -> None:
    """The check passes, and fails with the fault."""
    check()
    with pytest.MonkeyPatch.context() as patch:
        # Some faults are also found when a model is loaded; here the check must find them.
        patch.setattr("models.target.prove", lambda *_: None)
        fault(patch)
        with pytest.raises(caught):
            check()
