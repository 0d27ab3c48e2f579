"""The strict base of every section of a job file, and a type that several of them share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Device = Annotated[str, Field(pattern=r"^(auto|cpu|(cuda|mps|xpu)(:\d{1,4})?)$")]
"""Where a network runs, by torch's names; whether the machine has it shows where the network is loaded."""


class Section(BaseModel):
    """Strict base of every section: unknown keys and silent conversions are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
