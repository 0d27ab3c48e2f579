"""Builds drafters, tree policies and acceptance rules from classes that the job file names, and checks them."""

from __future__ import annotations

import inspect
from typing import Any

from configs.load import ConfigError
from configs.section import ExternalAcceptanceConfig, ExternalPartConfig
from decoding.conformance.contract import PROXIES
from decoding.contracts import Acceptance, Drafter, TreePolicy
from files.external_code import ExternalCodeError, load, place_of

BASES: dict[str, type] = {"drafter": Drafter, "tree": TreePolicy, "acceptance": Acceptance}
"""The interface of each part of a method."""
REQUIRED: dict[type, tuple[tuple[str, type], ...]] = {
    Drafter: (("name", str),),
    TreePolicy: tuple((name, int) for name in ("max_levels", "max_nodes", "max_frontier_nodes", "max_grown_nodes")),
    Acceptance: (("lossless", bool),),
}
"""Attributes that an instance must have, with their types."""


def external_part(config: ExternalPartConfig, name: str) -> Any:
    """Return a new drafter, tree or acceptance inside a proxy that checks the shapes that it returns; `name` is its
    field of `method`.

    Raises:
        ConfigError: the class cannot be imported, does not implement the interface, or does not take the options.
    """
    base, where = BASES[name], f"method.{name}"
    try:
        cls = load(config.kind)
    except ExternalCodeError as error:
        raise ConfigError(f"{where}.kind: {config.kind}: {error}") from None
    wanted = f"a subclass of draftfleet.decoding.contracts.{base.__name__}"
    if not (isinstance(cls, type) and issubclass(cls, base)):
        what = f"the class {cls.__qualname__}" if isinstance(cls, type) else type(cls).__name__
        raise ConfigError(f"{where}.kind: {config.kind} is {what}, and it must be {wanted}")
    try:
        inspect.signature(cls).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"{where}.options: {config.kind} refuses them: TypeError: {error}") from None
    try:
        part: Any = cls(**config.options)
    except Exception as error:  # a user's class raises any error
        reason = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ConfigError(f"{where}.kind: {config.kind} cannot be made: {reason}") from None
    for attribute, kind in REQUIRED[base]:
        if not isinstance(getattr(part, attribute, None), kind):
            raise ConfigError(f"{where}.kind: {config.kind} has no attribute {attribute!r} of type {kind.__name__}")
    if base is Drafter and part.name in ("", "none"):
        raise ConfigError(f"{where}.kind: {config.kind}.name is {part.name!r}, which is the name of plain decoding")
    if isinstance(config, ExternalAcceptanceConfig) and part.lossless != config.lossless:
        raise ConfigError(f"{where}.lossless: is {config.lossless}, and {config.kind}.lossless is {part.lossless}")
    return PROXIES[base](part, cls.__name__)
