"""Defines the strict base class of every section of a job file, and shared types."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError, PydanticKnownError

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
