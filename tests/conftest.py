"""Settings of every test: one torch thread, so that small models are not slowed by threads waiting for each other, and
examples of properties that are the same in every run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from files import external_code
from tests.durations import Durations

# Tests fork processes. The handlers that gRPC would run then can block later calls of Ray in this process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton interprets its kernels on a CPU; it decides when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Hypothesis limits the seconds of an example and of drawing it, which a busy machine exceeds.
settings.register_profile(
    "repeatable", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write CPU seconds to tests/durations.json")
    parser.addoption("--check-durations", action="store_true", help="fail if a test became ten times slower")


def pytest_configure(config: pytest.Config) -> None:
    options = config.getoption("record_durations"), config.getoption("check_durations")
    config.pluginmanager.register(Durations(*options), "durations")


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Undo what an engine or a training of an earlier test has set: threads that wait for each other spin."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_external_code() -> Iterator[None]:
    """Forget the modules of users that a test has installed in this process."""
    yield
    for module in external_code._FINDER.files:
        sys.modules.pop(module, None)
    external_code._FINDER.files.clear()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the slow cases of a parametrized test."""
    case = item.name.partition("[")[2]
    for marker in item.iter_markers("slow_cases"):
        if case.startswith(marker.args):
            item.add_marker("slow")
