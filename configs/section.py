"""Defines the strict base class of every section of a job file, and shared types."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

from files.external_code import PATTERN, is_external

_USER_IN_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://[^/?#]*@")
_SIGNED_QUERY = re.compile(r"[?&][^=&]*(sig|token|secret|passw|credential|key)[^=&]*=", re.IGNORECASE)

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.\-]{0,61}[A-Za-z0-9])?"
_LABEL_NAME = re.compile(rf"([A-Za-z0-9][A-Za-z0-9.\-]{{0,252}}/)?{_LABEL}")
_LABEL_CONDITION = re.compile(rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))")

MIN_GPU_SHARE = 0.0001
"""Ray counts resources in ten-thousandths."""

Places = TypeVar("Places", str, str | tuple[str, ...])


def without_credentials(value: Places) -> Places:
    """Refuse a URL that contains a user, a password or a signature, because job files are written into the output."""
    for url in (value,) if isinstance(value, str) else value:
        if _USER_IN_URL.match(url) or ("://" in url and _SIGNED_QUERY.search(url)):
            raise ValueError("a URL must not hold credentials; give them in the environment, as its driver reads it")
    return value


def _known_labels(value: dict[str, str]) -> dict[str, str]:
    for name, condition in value.items():
        if not _LABEL_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a label name such as pool or example.com/pool")
        if not _LABEL_CONDITION.fullmatch(condition):
            raise ValueError(f"{name}: {condition!r} is none of value, !value, in(a, b), !in(a, b)")
    return value


Labels = Annotated[dict[str, str], AfterValidator(_known_labels)]
"""Conditions on a node's labels, as Ray's `label_selector`."""


def _count_of_gpus(value: Any) -> Any:
    """Accept a number or `auto`, with the error messages of other numbers, which a union type would not give."""
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("float_type", "Input should be a valid number, or auto")
    if not math.isfinite(value):
        raise PydanticKnownError("finite_number")
    if value < 0:
        raise PydanticKnownError("greater_than_equal", {"ge": 0})
    if 0 < value < MIN_GPU_SHARE:
        raise PydanticCustomError("gpu_share", f"Input should be 0 or at least {MIN_GPU_SHARE:g}, Ray's smallest share")
    return float(value)


_GpuInput = Annotated[float, Field(ge=0.0)] | Literal["auto"]
NumGpus = Annotated[float | Literal["auto"], PlainValidator(_count_of_gpus, json_schema_input_type=_GpuInput)]
"""GPUs of one actor or worker; `auto` is resolved for the Ray of the job (`pipeline.resources`)."""

Device = Annotated[str, Field(pattern=r"^(auto|cpu|(cuda|mps|xpu)(:\d{1,4})?)$")]
"""A torch device name; its availability is checked when the network is loaded."""

Place = Annotated[str, AfterValidator(without_credentials)]
"""A path, a hub id or a URL without credentials, which may be printed and stored."""


class Section(BaseModel):
    """Strict base class of every section: unknown keys and implicit type conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class RemovedKey:
    """A key that sections had, the default that old records and fingerprints hold, and what replaces it."""

    default: Any
    replacement: str


REMOVED = {
    "controller.per_row": RemovedKey(
        False, "rows do not compete for drafts; leave it out, and all rows draft to the depth of the controller"
    ),
    "tree.parent_probability": RemovedKey("conditional", "a parent's own probability scales children; leave it out"),
    "tree.width_rounding": RemovedKey("nearest", "widths are rounded to the nearest number; leave it out"),
    "tree.min_children": RemovedKey(1, "scaling leaves at least one child; leave it out"),
    "tree.decay_first_level": RemovedKey(False, "widths decay beyond the first level; leave it out"),
    "tree.depth_rounding": RemovedKey("nearest", "depths are rounded to the nearest number; leave it out"),
    "tree.count_root": RemovedKey(False, "max_nodes does not count the root; subtract 1 from it"),
    "tree.order": RemovedKey("best_first", "the most probable nodes fill the budget; leave it out"),
}
"""Removed keys by the last two parts of their dotted path."""


def removed_defaults(section: str) -> dict[str, Any]:
    """Return the removed keys of a section at their defaults, which fingerprints of old outputs contain."""
    return {name.partition(".")[2]: key.default for name, key in REMOVED.items() if name.startswith(f"{section}.")}


def without_removed(data: Any, section: str = "") -> Any:
    """Return recorded data without removed keys at their defaults; other values of these keys are kept."""
    if isinstance(data, list):
        return [without_removed(value, section) for value in data]
    if not isinstance(data, dict):
        return data
    keys = {name: REMOVED.get(f"{section}.{name}") for name in data}
    return {
        name: without_removed(value, name)
        for name, value in data.items()
        if (key := keys[name]) is None or value != key.default
    }


BUILT_IN, EXTERNAL = "built-in", "module:name"
"""Tags of the two members of such unions, which pydantic inserts into the paths of problems."""

ExternalName = Annotated[str, Field(pattern=PATTERN, max_length=200)]
"""The name of external code, `module:name`."""


def kind_tag(section: Any) -> str:
    """Return the tag of a section, whose `kind` is a word, or the name of a class as `module:name`."""
    kind = section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
    return EXTERNAL if isinstance(kind, str) and ":" in kind else BUILT_IN


class ExternalPartConfig(Section):
    """A class of a module beside the job file, in the working directory, or installed: `module:Class`."""

    kind: ExternalName
    options: dict[str, JsonValue] = Field(default={}, max_length=64)
    """Keyword arguments of the class."""


class ExternalDrafterConfig(ExternalPartConfig):
    """A subclass of [`Drafter`](../guides/extend.md) in a module of yours, as `module:Class`."""


class ExternalTreeConfig(ExternalPartConfig):
    """A subclass of [`TreePolicy`](../guides/extend.md) in a module of yours, as `module:Class`."""


class ExternalAcceptanceConfig(ExternalPartConfig):
    """A subclass of [`Acceptance`](../guides/extend.md) in a module of yours, as `module:Class`."""

    lossless: bool = False
    """Whether the rule keeps the output of the target; its class must have the same `lossless`."""


def short_kind(kind: str) -> str:
    """Return the part of a kind that labels show: the class of `module:Class`, and any other kind itself."""
    return kind.partition(":")[2] if is_external(kind) else kind
