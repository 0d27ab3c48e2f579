"""Defines the section `output`: the structure of generated texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from configs.section import Section

MAX_SCHEMA_BYTES = 1 << 20


def _read_schema(value: Any) -> Any:
    """Return the content of the JSON file that a string names; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    if "://" in value:
        raise ValueError(f"{value} is a URL; the schema has to be a file on the machine that starts the job")
    try:
        with Path(value).open("rb") as file:
            data = file.read(MAX_SCHEMA_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{value} cannot be read: {error.strerror}") from None
    if len(data) > MAX_SCHEMA_BYTES:
        raise ValueError(f"{value} has more than {MAX_SCHEMA_BYTES:,} bytes")
    try:
        schema = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{value} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{value} holds {type(schema).__name__}, and a schema is a JSON object")
    return schema


class Output(Section):
    """[Structured output](../guides/structured-output.md): exactly one of the keys. Texts are free without it."""

    json_schema: Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)] = None
    """A JSON schema, or the path of a JSON file with one; texts are JSON values that it describes, on one line."""
    regex: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """A regular expression that texts match as a whole, in the syntax of Rust's `regex`, without look-around."""
    choices: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=10_000)] = ()
    """Texts, of which each row gets one."""

    @model_validator(mode="after")
    def _one_of(self) -> Output:
        if (self.json_schema is not None) + (self.regex is not None) + bool(self.choices) != 1:
            raise ValueError("give exactly one of output.json_schema, output.regex and output.choices")
        twice = next((one for place, one in enumerate(self.choices) if one in self.choices[:place]), None)
        if twice is not None:
            raise ValueError(f"choices: {twice!r} is listed twice")
        return self

    def content(self) -> dict[str, str]:
        """Return the fields that determine the output. The order of a schema's properties is that of the output's."""
        return {
            name: json.dumps(value) for name, value in self.model_dump(mode="json").items() if value not in (None, [])
        }
