"""Losses of one row against its plain output: edit distance, tokens before text, and a user's own function."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.losses import MetricError, Output, edit_distance, loss_of, relative_distance
from configs.load import ConfigError

ITEMS = st.lists(st.integers(0, 3), max_size=14)


def slow_distance(first: Sequence[int], other: Sequence[int]) -> int:
    """The matrix of Wagner and Fischer, row by row."""
    row = list(range(len(other) + 1))
    for index, left in enumerate(first, 1):
        above, row = row, [index]
        for column, right in enumerate(other, 1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (left != right)))
    return row[-1]


@given(first=ITEMS, other=ITEMS)
def test_the_edit_distance_is_that_of_the_whole_matrix(first: list[int], other: list[int]) -> None:
    assert edit_distance(first, other) == slow_distance(first, other)


def test_the_edit_distance_crosses_words_of_the_machine() -> None:
    long = [number % 7 for number in range(1000)]
    assert edit_distance(long, [*long[:500], 9, *long[500:]]) == 1
    assert edit_distance(long, long[100:900]) == 200


def test_losses_compare_tokens_and_fall_back_to_characters() -> None:
    first, other = Output("same text", (1, 2, 3, 4)), Output("same text", (1, 2, 9, 4))
    assert loss_of("exact", "--metric")(first, other) == 1.0
    assert loss_of("edit", "--metric")(first, other) == 0.25
    without = Output("same tent", None)
    assert loss_of("edit", "--metric")(first, without) == pytest.approx(1 / 9)
    assert loss_of("exact", "--metric")(Output("a"), Output("a", (1,))) == 0.0
    assert relative_distance("", "") == 0.0
    assert relative_distance("", "ab") == 1.0


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "metric_of_a_user.py").write_text(
        "def words(text, plain):\n    return float(set(text.split()) != set(plain.split()))\n"
        "def broken(text, plain):\n    return 1 / len('')\n"
        "def outside(text, plain):\n    return 1.5\n"
        "def absent(text, plain):\n    return float('nan')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "metric_of_a_user", raising=False)
    return "metric_of_a_user"


def test_a_function_of_the_user_gets_both_texts(module: str) -> None:
    loss = loss_of(f"{module}:words", "audit.metric")
    assert [loss(Output("a b"), Output("b a")), loss(Output("a b"), Output("b c"))] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "raised ZeroDivisionError"), ("outside", "returned 1.5"), ("absent", "returned nan")],
)
def test_a_function_that_fails_is_an_error_with_its_name(module: str, name: str, reason: str) -> None:
    with pytest.raises(MetricError, match=f"{module}:{name} {reason}"):
        loss_of(f"{module}:{name}", "audit.metric")(Output("a"), Output("b"))


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ("no_such_module:loss", "ModuleNotFoundError"),
        ("metric_of_a_user:nothing", "has no 'nothing'; it has absent"),
        ("metric_of_a_user:number", "is no function but int"),
        ("bleu", "ModuleNotFoundError"),
    ],
)
def test_a_metric_that_cannot_be_imported_is_refused(module: str, metric: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"audit\.metric: {metric}.*{reason}"):
        loss_of(metric, "audit.metric")
