"""Reading a job file: YAML, `section.field=value` overrides, and errors that name the dotted path.

Knows YAML and pydantic's error lists; the rules themselves are in `configs.schema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

JobModel = TypeVar("JobModel", bound=BaseModel)

MAX_YAML_CHARS = 1_000_000
MAX_YAML_NODES = 100_000
"""With every alias counted as often as it stands for its value."""

# Numbers to everyone but YAML 1.1, which wants a point and the exponent's sign.
_EXPONENT = re.compile(r"([-+]?\d+\.?\d*)[eE]([-+]?)(\d+)")


class ConfigError(ValueError):
    """A job file or override that is refused; the message names the dotted path and what to do."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Parse one YAML file into a mapping.

    Raises:
        ConfigError: the file is missing, is no YAML, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read: it is not UTF-8") from None
    data = _parse(text, f"{path}: it")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping of sections, not {type(data).__name__}")
    return data


def _parse(text: str, what: str) -> Any:
    """Text as YAML; a refusal repeats nothing of it, because it may hold what nobody should see."""
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
    except ValueError as error:  # dates that are none, numbers of too many digits
        reason = str(error)
    raise ConfigError(f"{what} is not valid YAML: {reason}")


def _construct(loader: yaml.SafeLoader) -> Any:
    """The document's value, as `yaml.safe_load` gives it, with its size and its keys checked before it is built."""
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count_nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Nodes of a tree in which every alias is replaced by its value, and no mapping has a key twice.

    Raises:
        yaml.MarkedYAMLError: there are too many, a node holds itself, or a key stands twice in one mapping.
    """
    if (known := counted.get(id(node))) is not None:
        if known < 0:
            raise _problem("a value holds itself", node)
        return known
    counted[id(node)] = -1
    total = 1
    if isinstance(node, yaml.MappingNode):
        keys: set[tuple[str, str]] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise _problem("a key is there twice in one section", key)
                keys.add((key.tag, key.value))
            total += _count_nodes(key, counted) + _count_nodes(value, counted)
    elif isinstance(node, yaml.SequenceNode):
        total += sum(_count_nodes(one, counted) for one in node.value)
    if total > MAX_YAML_NODES:
        raise _problem(f"its aliases stand for more than {MAX_YAML_NODES:,} values", node)
    counted[id(node)] = total
    return total


def _problem(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _kind(value: Any) -> str:
    return {"str": "text", "list": "a list", "bool": "a truth value"}.get(type(value).__name__, "a number")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one `section.field=value` in place; the value is read as YAML.

    Raises:
        ConfigError: there is no `=`, or the path runs through something that is no mapping.
    """
    dotted, separator, raw = override.partition("=")
    keys = dotted.split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override {override!r} must look like section.field=value")
    value = _parse(raw, f"override {dotted}: the value")
    node = data
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {dotted}: {'.'.join(keys[: depth + 1])} is no section but {_kind(child)}")
        node = child
    node[keys[-1]] = value


def validate(model: type[JobModel], data: dict[str, Any], origin: str) -> JobModel:
    """Check plain data against the schema.

    Raises:
        ConfigError: one line per problem, each with its dotted path.
    """
    try:
        # Through JSON, so that YAML lists are accepted for tuples while strings are never taken for numbers.
        written = json.dumps(data)
        torn = next(_torn(data), None)
    except TypeError as error:
        raise ConfigError(f"{origin}: holds a value that is neither text, number, list nor mapping: {error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{origin}: holds itself, or is nested too deeply") from None
    if torn is not None:
        where = ".".join(torn) or "(whole file)"
        raise ConfigError(f"{origin}: {where}: holds half of a surrogate pair, which is no text")
    try:
        return model.model_validate_json(written)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            where = ".".join(_written(problem["loc"], data)) or "(whole file)"
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = "is not a known key"
            elif problem["type"] == "missing":
                message = "is required"
            elif problem["type"] == "float_type" and (exponent := _EXPONENT.fullmatch(str(problem["input"]))):
                digits, sign, power = exponent.groups()
                point = "" if "." in digits else ".0"
                message += f"; YAML takes {problem['input']} for text: write {digits}{point}e{sign or '+'}{power}"
            lines.append(f"{origin}: {where}: {message}")
        raise ConfigError("\n".join(lines)) from None


def _torn(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where text stands that no UTF-8 can hold; YAML's escapes can write it."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _torn(key, path)
            yield from _torn(value, (*path, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _torn(value, (*path, str(index)))
    elif isinstance(node, str):
        try:
            node.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            yield path


def _written(location: tuple[int | str, ...], data: Any) -> list[str]:
    """A problem's place as the user wrote it: the names of chosen kinds, which pydantic puts in between, left out."""
    parts: list[str] = []
    node = data
    for part in location:
        if isinstance(node, dict) and part not in node and part == node.get("kind"):
            continue
        parts.append(str(part))
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return parts


def load_job(model: type[JobModel], path: str | Path, overrides: tuple[str, ...] = ()) -> JobModel:
    """Read one job file, apply overrides, and validate the whole.

    Raises:
        ConfigError: anything at all is wrong with it.
    """
    data = read_yaml(path)
    for override in overrides:
        apply_override(data, override)
    return validate(model, data, str(path))
