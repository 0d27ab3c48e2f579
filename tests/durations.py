"""CPU seconds of tests, and the tests that became ten times slower than tests/durations.json records.

Waiting for a busy machine costs no CPU time, and a slower machine slows down all tests alike.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median

import pytest

RECORDED = Path(__file__).with_name("durations.json")
FACTOR = 10.0
FLOOR_S = 1.0
"""Tests below this are not recorded and count as this long: the first test of a process also pays for imports. A test
that is marked slow and has no record is not compared."""
NUM_COMMON = 5
"""With fewer recorded tests in a run, its speed is taken to be that of the record."""


def cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def much_slower(spent_s: Mapping[str, float], recorded_s: Mapping[str, float]) -> list[str]:
    """One line for each test that took `FACTOR` times its recorded seconds, relative to the median of all tests."""
    ratios = [spent_s[test] / recorded_s[test] for test in spent_s.keys() & recorded_s.keys()]
    slowdown = max(1.0, median(ratios)) if len(ratios) >= NUM_COMMON else 1.0
    lines = []
    for test, seconds in sorted(spent_s.items()):
        expected_s = recorded_s.get(test, FLOOR_S) * slowdown
        if seconds > FACTOR * expected_s:
            lines.append(f"{test}: {seconds:.1f} CPU seconds instead of {expected_s:.1f}")
    return lines


class Durations:
    """Collects the CPU seconds of tests, also of those in xdist's workers; at the end compares or records them. A run
    with `check` fails if a test became slower."""

    def __init__(self, record: bool, check: bool, path: Path = RECORDED, clock: Callable[[], float] = cpu_s) -> None:
        self.record, self.check, self.path, self.clock = record, check, path, clock
        self.spent_s: dict[str, float] = {}
        self.slow: set[str] = set()
        self.slower: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self.began_s = self.clock()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        report.cpu_s = self.clock() - self.began_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A report of a worker that died has no time.
        spent_s = getattr(report, "cpu_s", 0.0)
        self.spent_s[report.nodeid] = max(spent_s, self.spent_s.get(report.nodeid, 0.0))
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput") or not self.spent_s:
            return
        recorded_s = json.loads(self.path.read_text()) if self.path.exists() else {}
        if self.record:
            others = {test: seconds for test, seconds in recorded_s.items() if test not in self.spent_s}
            slow = {test: round(seconds, 1) for test, seconds in self.spent_s.items() if seconds >= FLOOR_S}
            self.path.write_text(json.dumps(dict(sorted((others | slow).items())), indent=0) + "\n")
            return
        known = {test: seconds for test, seconds in self.spent_s.items() if test in recorded_s or test not in self.slow}
        self.slower = much_slower(known, recorded_s)
        if self.check and self.slower and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.slower:
            terminalreporter.section(f"tests that became {FACTOR:g} times slower: CONTRIBUTING.md, The suite", red=True)
        for line in self.slower:
            terminalreporter.write_line(line)
