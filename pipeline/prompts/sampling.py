"""Seed and sampling values of a row, from the columns that the job file names.

Validated by the schema of the section whose values they replace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.rows.schemas import RowError

MAX_SEED = 2**63 - 1
_INTEGERS = ("top_k", "max_new_tokens")


def read_sampling(
    fields: Mapping[str, Any], columns: BaseModel, job: BaseModel, names: Sequence[str], seed: int
) -> dict[str, int | float]:
    """The seed and the values of `names` for one row: its own where it has any, and otherwise the job's.

    `columns` names the row's columns, `job` is the section whose values they replace.

    Raises:
        RowError: `invalid_sampling`.
    """
    given = {name: _own(fields.get(getattr(columns, name) or "")) for name in ("seed", *names)}
    values: dict[str, int | float] = {"seed": seed}
    if given["seed"] is not None:
        own = integer_of(given["seed"])
        if own is None or not 0 <= own <= MAX_SEED:
            raise RowError("invalid_sampling", f"seed: {given['seed']!r:.100} is no integer from 0 to {MAX_SEED}")
        values["seed"] = own
    own_values = {name: _number(given[name], name) for name in names if given[name] is not None}
    try:
        sampling = type(job).model_validate({**{name: getattr(job, name) for name in names}, **own_values})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        raise RowError("invalid_sampling", f"{name}: {given[name]!r:.100}: {problem['msg']}") from None
    return values | {name: getattr(sampling, name) for name in names}


def _own(value: Any) -> Any:
    """The value; None for blank text too, the empty cell of a CSV."""
    return None if isinstance(value, str) and not value.strip() else value


def _number(value: Any, name: str) -> int | float:
    number = integer_of(value) if name in _INTEGERS else float_of(value)
    if number is None:
        kind = "integer" if name in _INTEGERS else "number"
        raise RowError("invalid_sampling", f"{name}: {value!r:.100} is no {kind}")
    return number


def float_of(value: Any) -> float | None:
    """A finite number, also out of text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def integer_of(value: Any) -> int | None:
    """Integers, floats without a fraction, and either of them as text; integers of any size stay exact."""
    if isinstance(value, str):
        try:
            return int(value) if len(value) < 40 else None
        except ValueError:
            pass
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = float_of(value)
    return int(number) if number is not None and number.is_integer() else None
