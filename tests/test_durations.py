"""A test that becomes ten times slower is named at the end of a run, on a machine of any speed."""

from __future__ import annotations

import json

import pytest

from tests.durations import FACTOR, FLOOR_S, much_slower

pytest_plugins = "pytester"

RECORDED = {f"t::{number}": 2.0 + number for number in range(9)}


def test_a_test_that_became_ten_times_slower_is_named() -> None:
    assert much_slower(RECORDED | {"t::4": 10 * 6.0 + 0.1}, RECORDED) == ["t::4: 60.1 CPU seconds instead of 6.0"]
    assert much_slower(RECORDED | {"t::4": 10 * 6.0}, RECORDED) == []


def test_a_machine_on_which_all_tests_are_slower_names_none() -> None:
    slow = {test: 20 * seconds for test, seconds in RECORDED.items()}
    assert much_slower(slow, RECORDED) == []
    assert len(much_slower(slow | {"t::0": 10.1 * 40.0}, RECORDED)) == 1


def test_a_machine_on_which_all_tests_are_faster_names_no_test_that_kept_its_time() -> None:
    assert much_slower({test: 0.05 * seconds for test, seconds in RECORDED.items()} | {"t::0": 2.0}, RECORDED) == []


def test_a_test_without_a_record_may_take_some_seconds() -> None:
    assert much_slower({"new": FACTOR * FLOOR_S}, {}) == []
    assert len(much_slower({"new": FACTOR * FLOOR_S + 0.1}, {})) == 1


CONFTEST = """
from pathlib import Path

import pytest

from tests.durations import Durations

now = [0.0]

def pytest_addoption(parser):
    parser.addoption("--record", action="store_true")
    parser.addoption("--check", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: x")
    options = map(config.getoption, ("record", "check"))
    config.pluginmanager.register(Durations(*options, Path("durations.json"), lambda: now[0]))

@pytest.fixture
def spend():
    return lambda seconds: now.__setitem__(0, now[0] + seconds)
"""


def test_a_planted_slow_test_fails_a_run_whose_durations_are_recorded(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it="def test_short(spend): spend(0.2)\n\n\ndef test_long(spend): spend(3.0)\n")
    assert pytester.runpytest_inprocess("--record").ret == 0
    assert json.loads((pytester.path / "durations.json").read_text()) == {"test_it.py::test_long": 3.0}
    assert pytester.runpytest_inprocess().ret == 0
    pytester.makepyfile(test_it="def test_short(spend): spend(0.2)\n\n\ndef test_long(spend): spend(31.0)\n")
    for options, status in (("--check",), 1), ((), 0):
        result = pytester.runpytest_inprocess(*options)
        assert result.ret == status
        result.stdout.fnmatch_lines(["*10 times slower*", "test_it.py::test_long: 31.0 CPU seconds instead of 3.0"])


def test_a_slow_test_is_compared_once_it_is_recorded(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    test = "import pytest\n\n\n@pytest.mark.slow\ndef test_slow(spend): spend({})\n"
    pytester.makepyfile(test_it=test.format(40.0))
    assert pytester.runpytest_inprocess("--check").ret == 0
    assert pytester.runpytest_inprocess("--record").ret == 0
    pytester.makepyfile(test_it=test.format(401.0))
    assert pytester.runpytest_inprocess("--check").ret == 1
