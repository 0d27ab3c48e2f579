"""Generates the reference of commands: options of every command, from its parser, and the targets of the Makefile."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from docgen.markdown import page, table
from jobs.cli import COMMANDS, module_of
from jobs.terminal.exit_status import MEANINGS


def commands_page(root: Path) -> str:
    """Render the options of every command, exit statuses, and make targets."""
    parts = [
        "`draftfleet NAME` runs a command; in a checkout `python -m jobs.NAME`, with underscores, is the same. `JOB` "
        "is a path, or the [name](presets.md) of a shipped job file; `section.field=value` replaces a value of it. "
        "`draftfleet --help` lists the commands, and `draftfleet --version` prints the version."
    ]
    for name in COMMANDS:
        parser = module_of(name).parser()
        about = [" ".join(text.split()) for text in (parser.description or "").strip().split("\n\n")]
        example = (parser.epilog or "").partition(" jobs.")[2].partition(" ")[2]
        parts += [
            f"## {name}",
            *about,
            f"Example: `draftfleet {name} {example}`",
            table(("option", "meaning"), _options(parser)),
        ]
    statuses = [(str(status), name, about) for status, (name, about) in MEANINGS.items()]
    scope = "Of jobs and trainings; check, export and verify have meanings of 3 of their own, in their help."
    parts += ["## Exit status", scope, table(("status", "name", "meaning"), statuses)]
    parts += ["## make", table(("command", "meaning"), make_targets((root / "Makefile").read_text()))]
    return page("Commands", *parts)


def make_targets(makefile: str) -> list[list[str]]:
    """Return target and help text of the comment lines `# make TARGET  text`."""
    targets: list[list[str]] = []
    for line in makefile.splitlines():
        if start := re.fullmatch(r"# (make [a-z-]+) +(\S.*)", line):
            targets.append([f"`{start[1]}`", start[2]])
        elif targets and (more := re.fullmatch(r"#  +(\S.*)", line)):
            targets[-1][1] += " " + more[1]
        elif targets:
            break
    return targets


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
