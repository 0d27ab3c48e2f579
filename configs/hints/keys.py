"""Lists the keys of a job file's schema: which of them is near an unknown one, and which take text."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from configs.hints.foreign_words import foreign_hint

Model = type[BaseModel]
NEAR = 0.72
"""Least similarity of two words that may be the same word."""


def sections_in(annotation: Any) -> Iterator[Model]:
    """Yield the sections that a field of this type may hold, in lists too."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation) if get_origin(annotation) is not Annotated else get_args(annotation)[:1]:
        yield from sections_in(part)


def models_at(model: Model, path: Sequence[str]) -> list[Model]:
    """Return the sections that may be at a dotted path; indices of lists are ignored."""
    models = [model]
    for part in path:
        if part.isdecimal():
            continue
        fields = [found.model_fields[part].annotation for found in models if part in found.model_fields]
        models = [section for annotation in fields for section in sections_in(annotation)]
    return models


def known_keys(model: Model) -> list[str]:
    """Return the dotted paths of all keys of a job file, without indices of lists; a recursive section is left out."""
    return list(dict.fromkeys(_walk(model, "", ())))


def _walk(model: Model, prefix: str, above: tuple[Model, ...]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for section in sections_in(field.annotation):
            if section not in above:
                yield from _walk(section, f"{prefix}{name}.", (*above, model))


def unknown_key(model: Model, path: Sequence[str]) -> str:
    """Return why a key is unknown, with the key that was probably meant: one of another program, a similar one of the
    same section, or one of the same name in another section."""
    *parents, word = path
    inside = list(dict.fromkeys(key for section in models_at(model, parents) for key in section.model_fields))
    message = "is not a known key"
    if hint := foreign_hint(word):
        return f"{message}; {hint}"
    here = ".".join(parents)
    start = f"{here}." if here else ""
    if near := difflib.get_close_matches(word, inside, n=1, cutoff=NEAR):
        return f"{message}; did you mean {start}{near[0]}?"
    by_name: dict[str, list[str]] = {}
    for key in known_keys(model):
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    if near := difflib.get_close_matches(word, by_name, n=1, cutoff=NEAR):
        places = sorted(by_name[near[0]], key=lambda key: (not key.startswith("sampling."), key.count(".")))
        return f"{message}; did you mean {' or '.join(places[:2])}?"
    if inside and len(inside) <= 12:
        return f"{message}; {here or 'a job file'} has {', '.join(inside)}"
    return message


def takes_text(model: Model, path: Sequence[str], raw: str) -> bool:
    """Return whether `raw`, the unquoted value of the key at a dotted path, can only be text: the key takes no other
    values, or besides text a list, which begins with a bracket."""
    models = models_at(model, path[:-1])
    fields = [section.model_fields[path[-1]] for section in models if path[-1] in section.model_fields]
    may_be_list = raw.startswith("[")
    return bool(fields) and all(_is_text(field.annotation, not may_be_list) for field in fields)


def short_form(model: Model, path: Sequence[str]) -> Model | None:
    """Return the section at a dotted path if text is its short form, as for `prompt`; None otherwise."""
    sections = models_at(model, path)
    is_short = len(path) == 1 and path[0] == "prompt" and len(sections) == 1 and "text" in sections[0].model_fields
    return sections[0] if is_short else None


def _is_text(annotation: Any, or_list: bool) -> bool:
    annotation = _plain(annotation)
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation is str
    parts = [_plain(part) for part in get_args(annotation) if part is not type(None)]
    lists = [part for part in parts if get_origin(part) is tuple]
    others = [part for part in parts if part not in lists]
    return bool(others) and (or_list or not lists) and all(_is_text(part, or_list) for part in others)


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
