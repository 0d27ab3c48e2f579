"""No test fails because the machine is busy: limits end only hangs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
MIN_S = 300.0
"""A limit that is shorter may be met by a busy machine; what has to time out is given 0 or a `_s` of its own."""
LIMIT = re.compile(r"\b(?:timeout=|PATIENCE_S = |TIMEOUT_S = |MAX_WAIT_S = |mark\.timeout\()(\d+(?:\.\d+)?)")


def test_limits_are_generous() -> None:
    short = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            limits = [float(match) for match in LIMIT.findall(line)]
            if any(0 < limit < MIN_S for limit in limits):
                short.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert short == []


def test_no_example_of_a_property_has_a_deadline() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_the_limit_of_one_test_ends_only_what_hangs() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["timeout"] >= 6 * MIN_S
