"""Generates the reference of job files from the pydantic models: every field with its default and meaning."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from configs.method import MethodConfig
from configs.output import ExportJobConfig
from configs.presets import method_names
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from configs.training import TrainDrafterJobConfig
from docgen.markdown import page, table

COMMON = "The keys of a YAML file for `python -m jobs.{}`. `required` has no default. Unknown keys are refused."
JOBS: dict[str, type[BaseModel]] = {
    "caption": CaptionJobConfig,
    "synthesize": SynthesizeJobConfig,
    "train": TrainDrafterJobConfig,
    "export": ExportJobConfig,
}
"""The schema of each kind of job file."""


@dataclass(frozen=True)
class Field:
    """One key of a job file."""

    path: str
    kind: str
    """The `kind` of the section that the key belongs to; empty if the section has no kinds."""
    default: str
    meaning: str

    @property
    def key(self) -> str:
        """Path and kind, unique in a page."""
        return f"{self.path} {self.kind}".strip()


def fields(model: type[BaseModel]) -> list[Field]:
    """Return the fields of a job's schema in order, without duplicates."""
    by_key: dict[str, Field] = {}
    for field in _walk(model):
        by_key.setdefault(field.key, field)
    return list(by_key.values())


def reference(job: str, model: type[BaseModel]) -> str:
    """Render the page of one job: a table for each section."""
    sections: dict[str, list[Field]] = {}
    for field in fields(model):
        sections.setdefault(field.path.split(".")[0].split("[")[0], []).append(field)
    parts = [COMMON.format("train_drafter" if job == "train" else job)]
    for name, inside in sections.items():
        kinds = any(field.kind for field in inside)
        head = ("field", "kind", "default", "meaning") if kinds else ("field", "default", "meaning")
        rows = [
            [f"`{f.path}`", *([f"`{f.kind}`" if f.kind else ""] if kinds else []), f.default, f.meaning] for f in inside
        ]
        parts += [f"## `{name}`", table(head, rows)]
    return page(f"Job file: {job}", *parts)


def _walk(
    model: type[BaseModel], prefix: str = "", kind: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[Field]:
    """Yield every leaf; a recursive section is listed once."""
    for name, field in model.model_fields.items():
        sections = [inner for inner in _sections_in(field.annotation) if inner not in above]
        described = " ".join((field.description or (name == "kind" and model.__doc__) or "").split())
        if name == "kind" and _choice_of(model):
            yield Field(prefix + name, kind, "default" if _is_default(model) else "", described)
        elif described or not sections:
            yield Field(prefix + name, kind, _shown(field.default, is_section=bool(sections)), described)
        for inner in sections:
            below = prefix + name + ("[]." if _is_list(field.annotation) else ".")
            yield from _walk(inner, below, _choice_of(inner) or kind, (*above, model))


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        return _sections_in(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return [section for part in get_args(annotation) for section in _sections_in(part)]
    return [annotation] if inspect.isclass(annotation) and issubclass(annotation, BaseModel) else []


def _is_list(annotation: Any) -> bool:
    return get_origin(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation) is tuple


def _shown(default: Any, is_section: bool) -> str:
    """Format a default as in YAML; the default of a section is only shown if it is null."""
    if default is PydanticUndefined:
        return "required"
    if is_section:
        return "`null`" if default is None else ""
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default, default=str)}`"


def _is_default(choice: type[BaseModel]) -> bool:
    method = MethodConfig()
    choices = (method.drafter, *method.contexts, method.tree, method.acceptance, method.controller)
    return any(type(part) is choice for part in choices)


def _choice_of(model: type[BaseModel]) -> str:
    """Return the `kind` that selects this section; empty for a section without kinds."""
    default = model.model_fields["kind"].default if "kind" in model.model_fields else None
    return default if isinstance(default, str) else ""


def json_schema(model: type[BaseModel]) -> str:
    """Return the JSON schema of a job file, with the short forms: names of methods, and a prompt as text."""
    schema = model.model_json_schema()
    properties = schema["properties"]
    if "prompt" in properties:
        properties["prompt"] = {"anyOf": [{"type": "string"}, properties["prompt"]]}
    if "method" in properties:
        name = {"type": "string", "enum": method_names()}
        properties["method"] = {"anyOf": [name, properties["method"]]}
        candidates = schema["$defs"]["AutoMethodConfig"]["properties"]["candidates"]
        candidates["items"] = {"anyOf": [name, candidates["items"]]}
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1) + "\n"
