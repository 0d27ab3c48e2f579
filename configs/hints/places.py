"""Finds where the value that a refusal names is written: a line of the job file, or the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from configs.presets import find_job
from configs.yaml_file import MAX_YAML_CHARS, ConfigError
from files.local import read_regular

_DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)*")
MAX_DEPTH = 64


def with_places(message: str, path: str | Path, overrides: Sequence[str]) -> str:
    """Add to each line of a refusal the file and the line where the value is, or `command line`; lines that name no key
    of the job are unchanged."""
    try:
        file, defaults = find_job(path)
        text = read_regular(file, 4 * MAX_YAML_CHARS).decode("utf-8")
        root = yaml.SafeLoader(text).get_single_node()
    except (ConfigError, OSError, ValueError, yaml.YAMLError, RecursionError):
        return message
    return "\n".join(_placed(line, file, root, defaults, overrides) for line in message.splitlines())


def _placed(message: str, file: Path, root: yaml.Node | None, defaults: Sequence[str], overrides: Sequence[str]) -> str:
    begins = f"{file}: "
    rest = message.removeprefix(begins)
    shown = "" if message.startswith(begins) else f"{file}, "
    for parts in _paths(rest):
        for dotted in (text.partition("=")[0].split(".") for text in reversed(overrides)):
            if dotted[: len(parts)] == parts[: len(dotted)]:
                return f"{message} (command line)"
        for dotted in (text.partition("=")[0].split(".") for text in defaults):
            if dotted[: len(parts)] == parts[: len(dotted)]:
                return f"{message} (preset)"
        if (line := line_of(root, parts)) is not None:
            return f"{message} ({shown}line {line})"
    return message


def _paths(message: str) -> Iterator[list[str]]:
    """Yield the dotted path that begins a refusal, and then those in its text."""
    for found in _DOTTED.finditer(message):
        parts = found.group().split(".")
        if found.start() == 0 or len(parts) > 1:
            yield parts


def line_of(node: yaml.Node | None, parts: Sequence[str]) -> int | None:
    """Return the line of the deepest key of a dotted path that a YAML document has, from 1; None if it has not even the
    first."""
    line = None
    for part in parts[:MAX_DEPTH]:
        key, value = _child(node, part)
        if key is None:
            break
        node, line = value, key.start_mark.line + 1
    return line


def _child(node: yaml.Node | None, part: str) -> tuple[yaml.Node | None, yaml.Node | None]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == part:
                return key, value
    elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)], node.value[int(part)]
    return None, None
