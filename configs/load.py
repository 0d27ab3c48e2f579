"""Loads a job file with overrides `section.field=value` and named methods; errors name the dotted path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from configs.hints.keys import short_form, takes_text, unknown_key
from configs.presets import find_job, preset, replacement_of, resolve_methods
from configs.section import BUILT_IN, EXTERNAL, REMOVED, without_removed
from configs.yaml_file import ConfigError, parse, read_yaml

__all__ = ["ConfigError", "apply_override", "load_job", "load_preset", "validate"]

JobModel = TypeVar("JobModel", bound=BaseModel)

MAX_SHOWN_CHARS = 60
"""Longest text of a value that a message repeats."""

# Numbers that YAML 1.1 parses as text, because it requires a decimal point and a sign of the exponent.
_EXPONENT = re.compile(r"([-+]?\d+\.?\d*)[eE]([-+]?)(\d+)")


def _kind(value: Any) -> str:
    return {"str": "text", "list": "a list", "bool": "a truth value"}.get(type(value).__name__, "a number")


def apply_override(data: dict[str, Any], override: str, model: type[BaseModel] | None = None) -> None:
    """Set one `section.field=value` in place. The value is read as YAML; if `model` takes only text for the field, an
    unquoted value is that text as it is.

    Raises:
        ConfigError: there is no `=`, or the path leads through a value that is not a mapping.
    """
    dotted, separator, raw = override.partition("=")
    keys = dotted.split(".")
    if not separator or not all(keys):
        raise ConfigError(f"override {override!r} must look like section.field=value")
    value = _value(raw, f"override {dotted}: the value", model, keys)
    node = data
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {dotted}: {'.'.join(keys[: depth + 1])} is not a section but {_kind(child)}")
        node = child
    node[keys[-1]] = value


def _value(raw: str, what: str, model: type[BaseModel] | None, keys: list[str]) -> Any:
    """Return the value of an override."""
    if model is None or raw.lstrip()[:1] in ('"', "'", "|", ">"):
        return parse(raw, what)
    text = raw.strip()
    if text in ("", "null", "~"):
        return None
    if takes_text(model, keys, text):
        return text
    section = short_form(model, keys)
    if section is None:
        return parse(raw, what)
    if text.startswith("{"):
        try:
            value = parse(raw, what)
        except ConfigError:
            return text
        if isinstance(value, dict) and set(value) <= set(section.model_fields):
            return value
    return text


def _shown(value: Any) -> str:
    """Return a value for a message, as `, not VALUE`; empty for sections, long texts and texts that may be secret."""
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    if isinstance(value, int | float):
        return f", not {value}"
    is_plain = isinstance(value, str) and len(value) <= MAX_SHOWN_CHARS and not re.search(r"://|@|[?&]", value)
    return f", not {value!r}" if is_plain else ""


def validate(model: type[JobModel], data: dict[str, Any], origin: str, recorded: bool = False) -> JobModel:
    """Validate plain data against the schema `model`; in a `recorded` configuration, removed keys at their old defaults
    are dropped.

    Raises:
        ConfigError: one line per problem, each with its dotted path.
    """
    if recorded:
        data = without_removed(data)
    try:
        # In JSON mode, pydantic accepts lists for tuples, and strictly refuses strings for numbers.
        written = json.dumps(data)
        invalid = next(_invalid_text(data), None)
    except TypeError as error:
        raise ConfigError(f"{origin}: has a value that is not text, a number, a list or a mapping: {error}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{origin}: contains itself, or is nested too deeply") from None
    if invalid is not None:
        where = ".".join(invalid) or "(whole file)"
        raise ConfigError(f"{origin}: {where}: contains half of a surrogate pair, which is not valid text")
    try:
        return model.model_validate_json(written)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            path = _written(problem["loc"], data)
            where = ".".join(path) or "(whole file)"
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                removed = REMOVED.get(".".join(path[-2:]))
                message = unknown_key(model, path) if removed is None else f"was removed: {removed.replacement}"
            elif problem["type"] == "string_pattern_mismatch" and EXTERNAL in problem["loc"]:
                message = "must name a class as module:Class, such as my_drafter:MyDrafter, in letters, digits and _"
            elif problem["type"] == "union_tag_invalid" and "." in str(problem.get("ctx", {}).get("tag")):
                message += "; a class of yours is written module:Class"
            elif problem["type"] == "missing":
                message = "is required"
            elif problem["type"] == "float_type" and (exponent := _EXPONENT.fullmatch(str(problem["input"]))):
                digits, sign, power = exponent.groups()
                point = "" if "." in digits else ".0"
                message += f"; YAML parses {problem['input']} as text; write {digits}{point}e{sign or '+'}{power}"
            elif message.startswith("Input should be"):
                message += _shown(problem["input"])
            lines.append(f"{origin}: {where}: {message}")
        raise ConfigError("\n".join(lines)) from None


def _invalid_text(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of text that UTF-8 cannot encode; YAML escapes can produce such text."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _invalid_text(key, path)
            yield from _invalid_text(value, (*path, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _invalid_text(value, (*path, str(index)))
    elif isinstance(node, str):
        try:
            node.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            yield path


def _written(location: tuple[int | str, ...], data: Any) -> list[str]:
    """Return the path of a problem in the job file, without the union tags that pydantic inserts."""
    parts: list[str] = []
    node = data
    for part in location:
        keys, kind = (node, node.get("kind")) if isinstance(node, dict) else ((), None)
        if part not in keys and part in (kind, BUILT_IN, EXTERNAL):
            continue
        parts.append(str(part))
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
    return parts


def load_job(model: type[JobModel], path: str | Path, overrides: tuple[str, ...] = ()) -> JobModel:
    """Read one job file, apply overrides in order, resolve named methods, and validate the result. `path` may be the
    name of a preset or of a shipped job file.

    Raises:
        ConfigError: the file or an override is invalid.
    """
    if not Path(path).exists() and (successor := replacement_of(path)):
        raise ConfigError(f"{path}: was replaced; use {successor}")
    path, defaults = find_job(path)
    data = read_yaml(path)
    for override in (*defaults, *overrides):
        if override.startswith("method."):
            resolve_methods(data, str(path))
        apply_override(data, override, model)
    resolve_methods(data, str(path))
    return validate(model, data, str(path))


def load_preset(model: type[JobModel], name: str, overrides: tuple[str, ...] = ()) -> JobModel:
    """Load a preset of `configs.presets` with further overrides.

    Raises:
        KeyError: no preset has this name.
        ConfigError: an override is invalid.
    """
    path, defaults = preset(name)
    return load_job(model, path, (*defaults, *overrides))
