"""Defines the sections of drafters, trees and acceptance rules that are classes of a user's module."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, JsonValue

from configs.section import Section
from files.external_code import PATTERN, is_external

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
