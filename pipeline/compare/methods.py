"""Reads the methods of a comparison: names of `configs/methods`, or paths of YAML files with a section `method`.

plain                                  a shipped method
mine.yaml                              its section `method`, and its `model.drafter` if it has one
eagle3@zoo/checkpoints/caption_eagle3  a method with another drafter checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import ConfigError
from configs.presets import find_job, named_method
from configs.yaml_file import read_yaml

PLAIN = "plain"
DOTTED = "--methods"
_SUFFIXES = (".yaml", ".yml")
_SECTIONS = {"method", "model"}


@dataclass(frozen=True)
class ComparedMethod:
    """A method of the comparison: its name, which is also that of its output folder, and the overrides of the job."""

    name: str
    overrides: tuple[str, ...]


def read_methods(text: str) -> list[ComparedMethod]:
    """Read a list with commas; `plain` comes first, and is added if it is missing.

    Raises:
        ConfigError: a method is unknown or named twice, or a file has no section `method`.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{DOTTED}: names no method; give names of configs/methods, or paths, with commas")
    methods = [_method(word) for word in words]
    if all(method.name != PLAIN for method in methods):
        methods.insert(0, _method(PLAIN))
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{DOTTED}: two methods are named {name!r}; give one of them a file of another name")
    return sorted(methods, key=lambda method: method.name != PLAIN)


def _method(word: str) -> ComparedMethod:
    name, _, drafter = word.partition("@")
    overrides: list[str] = []
    if name.endswith(_SUFFIXES):
        overrides += _from_file(Path(name))
        name = Path(name).stem
    else:
        named_method(name, DOTTED)
        overrides.append(f"method={name}")
        if name == PLAIN:
            overrides.append("model.drafter=null")
    if drafter:
        overrides.append(f"model.drafter.path={drafter}")
        name = f"{name}-{Path(drafter.rstrip('/')).name}"
    return ComparedMethod(re.sub(r"[^\w.-]", "_", name), tuple(overrides))


def _from_file(path: Path) -> list[str]:
    data = read_yaml(path)
    if "method" not in data:
        raise ConfigError(f"{DOTTED}: {path} has no section method")
    unknown = sorted(set(data) - _SECTIONS)
    model = data.get("model") or {}
    if not isinstance(model, dict) or set(model) - {"drafter"}:
        unknown.append("model, beyond model.drafter")
    if unknown:
        raise ConfigError(
            f"{DOTTED}: {path} has {', '.join(unknown)}; a method's file has the section method, and model.drafter: "
            "all else is that of the job, so that methods are compared on the same rows"
        )
    overrides = [f"method={json.dumps(data['method'])}"]
    if model:
        overrides.append(f"model.drafter={json.dumps(model['drafter'])}")
    return overrides


def makes_images(path: Path) -> bool:
    """Return whether a job file is one of a synthesis job: it has a VQ model, a text encoder, or conditions."""
    data: Any = read_yaml(find_job(path)[0])
    model, columns = (data.get(name) or {} for name in ("model", "columns"))
    has_condition = isinstance(columns, dict) and bool({"label", "features"} & set(columns))
    return has_condition or (isinstance(model, dict) and bool({"vq", "condition"} & set(model)))


def common_overrides(output: str, method: ComparedMethod, images: bool, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the job of one method, which writes below `output`."""
    path = f"{output.rstrip('/')}/{method.name}"
    kept = ["sink.keep_codes=true"] if images else ["sink.keep_tokens=true", "audit=null"]
    return [*overrides, *method.overrides, *kept, "sink.exports=[]", f"sink.path={path}"]
