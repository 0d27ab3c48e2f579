"""Prints why a job is refused, failed or was stopped: with the place of a value in the job file, red on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.hints.places import with_places
from configs.load import ConfigError
from jobs.terminal.exit_status import REFUSED
from pipeline.storage import access
from pipeline.storage.failures import explain

RED, RESET = "\x1b[1;31m", "\x1b[0m"


def print_failure(text: str) -> None:
    """Print a message to standard error, red if that is a terminal (the variable NO_COLOR switches colours off)."""
    is_red = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"{RED}{text}{RESET}" if is_red else text, file=sys.stderr, flush=True)


def refuse(error: ConfigError, path: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Print a refusal, with the place of the value that it names, and return its exit status."""
    message = str(error) if path is None else with_places(str(error), path, overrides)
    print_failure(f"refused: {message}")
    return REFUSED


def as_refusal(error: Exception) -> ConfigError:
    """Return the refusal of an error of a store or of the operating system while a job is planned; another error is
    raised."""
    if isinstance(error, OSError) or explain(error):
        return ConfigError(f"the job cannot be planned: {access.reason_of(error)}")
    raise error
