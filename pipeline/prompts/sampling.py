"""Reads a row's seed and sampling values from its columns and validates them like the job's section."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.rows.schemas import RowError

MAX_SEED = 2**63 - 1
_INTEGERS = ("top_k", "max_new_tokens")
_TEXTS = ("negative_prompt",)


def sampling_names(columns: BaseModel, job: BaseModel) -> list[str]:
    """Return the numbers of section `job` that a row may override: those that `columns` has, too."""
    return [name for name in type(columns).model_fields if name in type(job).model_fields and name not in _TEXTS]


def read_sampling(fields: Mapping[str, Any], columns: BaseModel, job: BaseModel, seed: int) -> dict[str, int | float]:
    """Return a row's seed and sampling values, with the job's values as defaults; RowError `invalid_sampling`."""
    names = sampling_names(columns, job)
    given = {name: fields.get(getattr(columns, name) or "") for name in ("seed", *names)}
    # An empty CSV field is blank text.
    given = {name: value for name, value in given.items() if value is not None and str(value).strip()}
    values: dict[str, int | float] = {"seed": seed}
    if "seed" in given:
        own_seed = integer_of(given["seed"])
        if own_seed is None or not 0 <= own_seed <= MAX_SEED:
            raise RowError("invalid_sampling", f"seed: {given['seed']!r:.100} is no integer from 0 to {MAX_SEED}")
        values["seed"] = own_seed
    numbers: dict[str, int | float] = {}
    for name in (name for name in names if name in given):
        is_integer = name in _INTEGERS
        number = integer_of(given[name]) if is_integer else float_of(given[name])
        if number is None:
            kind = "integer" if is_integer else "number"
            raise RowError("invalid_sampling", f"{name}: {given[name]!r:.100} is no {kind}")
        numbers[name] = number
    try:
        sampling = type(job).model_validate({**{name: getattr(job, name) for name in names}, **numbers})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        raise RowError("invalid_sampling", f"{name}: {given[name]!r:.100}: {problem['msg']}") from None
    return values | {name: getattr(sampling, name) for name in names}


def float_of(value: Any) -> float | None:
    """Convert a number or text to a finite float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def integer_of(value: Any) -> int | None:
    """Convert an integer, an integral float, or text of either to an exact int; None for any other value."""
    if isinstance(value, str):
        try:
            return int(value) if len(value) < 40 else None
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float_of(value)
    return int(number) if number is not None and number.is_integer() else None
