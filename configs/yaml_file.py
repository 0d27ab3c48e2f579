"""Reads one YAML file within limits of size, number of values and nesting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from files.local import read_regular

MAX_YAML_CHARS = 1_000_000
MAX_YAML_NODES = 100_000
"""Maximum number of values of a file; each alias counts as a copy of its value."""


class ConfigError(ValueError):
    """Raised for an invalid job file or override; the message names the dotted path and the remedy."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Parse one YAML file into a mapping. Raises ConfigError if the file is missing, is not valid YAML, or is not a
    mapping."""
    try:
        text = read_regular(path, 4 * MAX_YAML_CHARS).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8") from None
    data = parse(text, f"{path}: it")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(data).__name__}")
    return data


def parse(text: str, what: str) -> Any:
    """Parse text as YAML; errors do not quote the text, because it may contain credentials."""
    try:
        if len(text) > MAX_YAML_CHARS:
            raise ValueError(f"it has {len(text):,} characters, more than {MAX_YAML_CHARS:,}")
        return _construct(yaml.SafeLoader(text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = f"{error.problem}{where}"
    except yaml.YAMLError:
        reason = "a character in it is not allowed"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:  # invalid dates, numbers with too many digits
        reason = str(error)
    raise ConfigError(f"{what} is not valid YAML: {reason}")


def _construct(loader: yaml.SafeLoader) -> Any:
    """Load YAML like `yaml.safe_load`, but check size and keys before objects are built."""
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Count nodes, with each alias counted as a copy of its value. Raises yaml.MarkedYAMLError if there are too many
    nodes, a node contains itself, or a mapping has a key twice."""
    if (known := counted.get(id(node))) is not None:
        if known < 0:
            raise _problem("a value contains itself", node)
        return known
    counted[id(node)] = -1
    total = 1
    if isinstance(node, yaml.MappingNode):
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise _problem("a section has a key twice", key)
                keys.add((key.tag, key.value))
            total += _count_nodes(key, counted) + _count_nodes(value, counted)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count_nodes(child, counted) for child in node.value)
    if total > MAX_YAML_NODES:
        raise _problem(f"with its aliases it has more than {MAX_YAML_NODES:,} values", node)
    counted[id(node)] = total
    return total


def _problem(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
