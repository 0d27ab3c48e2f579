"""Generates the reference of commands: the options of every job, from its parser, and the targets of the Makefile."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import re
from pathlib import Path
from unittest import mock

from docgen.markdown import page, table
from jobs.exit_status import MEANINGS


def parser_of(module: str) -> argparse.ArgumentParser:
    """Return the parser of `python -m module`."""
    seen: list[argparse.ArgumentParser] = []
    record = mock.patch.object(argparse.ArgumentParser, "print_help", lambda parser, file=None: seen.append(parser))
    with record, contextlib.suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    return seen[0]


def commands_page(root: Path) -> str:
    """Render the options of every job, exit statuses, and make targets."""
    parts = ["Run jobs from the checkout: `python -m jobs.NAME`. `section.field=value` replaces a value of the YAML."]
    for path in sorted((root / "jobs").glob("*.py")):
        if '__name__ == "__main__"' in path.read_text():
            parser = parser_of(f"jobs.{path.stem}")
            about = [" ".join(text.split()) for text in (parser.description or "").strip().split("\n\n")]
            parts += [f"## jobs.{path.stem}", *about, table(("option", "meaning"), _options(parser))]
    statuses = [(str(status), name, about) for status, (name, about) in MEANINGS.items()]
    scope = (
        "Of jobs and trainings; jobs.check, jobs.export and jobs.verify have meanings of 3 of their own, in their help."
    )
    parts += ["## Exit status", scope, table(("status", "name", "meaning"), statuses)]
    parts += ["## make", table(("command", "meaning"), make_targets((root / "Makefile").read_text()))]
    return page("Commands", *parts)


def make_targets(makefile: str) -> list[list[str]]:
    """Return target and help text of the comment lines `# make TARGET  text`."""
    found: list[list[str]] = []
    for line in makefile.splitlines():
        if start := re.fullmatch(r"# (make [a-z-]+) +(\S.*)", line):
            found.append([f"`{start[1]}`", start[2]])
        elif found and (more := re.fullmatch(r"#  +(\S.*)", line)):
            found[-1][1] += " " + more[1]
        elif found:
            break
    return found


def _options(parser: argparse.ArgumentParser) -> list[list[str]]:
    rows = []
    for action in parser._actions:  # argparse has no public list
        if isinstance(action, argparse._HelpAction):
            continue
        name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
        required = " (required)" if action.required and action.option_strings else ""
        rows.append([f"`{name}{value}`", f"{action.help or ''}{required}"])
    return rows
