"""The strict base of every section of a job file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Strict base of every section: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
