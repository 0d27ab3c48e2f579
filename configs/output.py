"""Defines the output of caption jobs: the structure of texts, and exports of results in other forms than Parquet."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from configs.section import ExternalName, Place, Section
from files.local import read_regular
from files.strict_json import JsonError, parse_json

MAX_SCHEMA_BYTES = 1 << 20
MAX_SCHEMA_DEPTH = 200
"""Maximum number of levels of nesting of a schema; the grammar library has a lower limit of its own."""
MAX_EXACT = 2**53
"""Largest magnitude of integers that doubles hold without gaps."""
_MAXIMA = ("maximum", "exclusiveMaximum")
_INSIDE = {
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"), "names"),
    **dict.fromkeys(("const", "enum"), "value"),
}
"""What keywords of a schema hold, if not a schema: schemas by name, or values."""
_REMARKS = ("default", "examples", "example", "title", "description", "$comment")
"""Keywords that restrict no values."""


def _read_schema(value: Any) -> Any:
    """Return the content of the JSON file that a string names; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    if "://" in value:
        raise ValueError(f"{value} is a URL; the schema has to be a file on the machine that starts the job")
    try:
        schema = parse_json(read_regular(value, MAX_SCHEMA_BYTES))
    except OSError as error:
        raise ValueError(f"{value} cannot be read: {error.strerror}") from None
    except JsonError as error:
        raise ValueError(f"{value} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{value} holds {type(schema).__name__}, and a schema is a JSON object")
    return schema


def _check_numbers(schema: Any) -> Any:
    """Return a schema unchanged; ValueError, with its path, for a number that the grammar library would change. It
    computes with doubles, and lowers a maximum of 64 bits to the largest signed one."""
    for path, value in _numbers(schema):
        where, keyword = ".".join(path), path[-1]
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {value} is no number of JSON")
        if isinstance(value, int) and not _is_exact(value, keyword):
            about = (
                f"{value}"
                if abs(value) < 10**30
                else f"an integer of {1 + int(value.bit_length() * math.log10(2))} digits"
            )
            raise ValueError(f"{where}: {about} is beyond ±2**53, and the grammar would round it")
    return schema


def _is_exact(value: int, keyword: str) -> bool:
    if abs(value) <= MAX_EXACT:
        return True
    if keyword in _MAXIMA and value >= 2**63 - 1:
        return value < 2**64
    return -(2**63) <= value < 2**63 and int(float(value)) == value


def _numbers(schema: Any) -> Iterator[tuple[tuple[str, ...], int | float]]:
    """Yield the numbers that restrict values, with their paths; does not recurse."""
    stack: list[tuple[tuple[str, ...], Any, str]] = [((), schema, "schema")]
    while stack:
        path, value, kind = stack.pop()
        if len(path) > MAX_SCHEMA_DEPTH:
            raise ValueError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(value, dict):
            for name, inner in value.items():
                if kind == "schema" and name in _REMARKS:
                    continue
                inside = {"schema": _INSIDE.get(name, "schema"), "names": "schema", "value": "value"}[kind]
                stack.append(((*path, name), inner, inside))
        elif isinstance(value, list):
            stack += [((*path, f"{index}"), inner, kind) for index, inner in enumerate(value)]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


class OutputConfig(Section):
    """[Structured output](../guides/structured-output.md): exactly one of the keys. Texts are free without it."""

    json_schema: Annotated[dict[str, Any] | None, BeforeValidator(_read_schema), AfterValidator(_check_numbers)] = None
    """A JSON schema, or the path of a JSON file with one; texts are JSON values that it describes, on one line."""
    regex: Annotated[str, Field(min_length=1, max_length=65_536)] | None = None
    """A regular expression that texts match as a whole, in the syntax of Rust's `regex`, without look-around."""
    choices: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=10_000)] = ()
    """Texts, of which each row gets one."""

    @model_validator(mode="after")
    def _one_of(self) -> OutputConfig:
        if (self.json_schema is not None) + (self.regex is not None) + bool(self.choices) != 1:
            raise ValueError("give exactly one of output.json_schema, output.regex and output.choices")
        [(most, count)] = Counter(self.choices).most_common(1) or [("", 0)]
        if count > 1:
            raise ValueError(f"choices: {most!r} is listed twice")
        return self

    def content(self) -> dict[str, str]:
        """Return the fields that determine the output. The order of a schema's properties is that of the output's."""
        return {
            name: json.dumps(value) for name, value in self.model_dump(mode="json").items() if value not in (None, [])
        }


CAPTION_COLUMN = "generated_text"


class SidecarExportConfig(Section):
    """A text or JSON file beside each listed image or video."""

    kind: Literal["sidecars"] = "sidecars"
    format: Literal["txt", "json"] = "txt"
    """`txt`: the caption and a line feed; `json`: an object of `columns`."""
    existing: Literal["skip", "overwrite", "append"] = "skip"
    """If the file exists: leave it, replace it, or add the caption at its end. `append` adds no caption that is in the
    file."""
    names: Literal["stem", "full"] = "stem"
    """`a.txt` or `a.jpg.txt` for `a.jpg`."""
    columns: Annotated[tuple[str, ...], Field(min_length=1)] = ("sample_id", CAPTION_COLUMN)
    """Columns of the output in the object; for `json`."""


class DatasetExportConfig(Section):
    """A folder with Parquet files and a dataset card, which `datasets.load_dataset` opens."""

    kind: Literal["dataset"] = "dataset"
    path: Place
    """The folder, empty or written by the same export."""
    columns: tuple[str, ...] = ()
    """Columns of the output; by default `sample_id`, `source`, `generated_text` and those of `sink.keep_columns`; of
    images `sample_id`, `prompt`, `image`, seed and sampling values."""
    images: Literal["none", "first", "all"] = "none"
    """Whether the first image of a row (column `image`), or all of them (column `images`), are read again and added."""
    title: Annotated[str, Field(min_length=1, max_length=200)] = "Captions"
    """The title of the dataset card."""


class WebDatasetExportConfig(Section):
    """New tars with the names and members of the source's, and one more member with the caption in each sample."""

    kind: Literal["webdataset"] = "webdataset"
    path: Place
    """The folder of the new tars, empty or written by the same export."""
    extension: Annotated[str, Field(pattern=r"^[a-z0-9_]+(\.[a-z0-9_]+)*$", max_length=64)] = "caption.txt"
    """Extension of the new member; if it ends in `json`, the member is an object of `columns`."""
    existing: Literal["skip", "overwrite"] = "skip"
    """If a sample has a member with this extension: leave it as it is, or replace it."""
    columns: Annotated[tuple[str, ...], Field(min_length=1)] = ("sample_id", CAPTION_COLUMN)
    """Columns of the output in the object."""


class OpenAIBatchExportConfig(Section):
    """Result lines of OpenAI's batch format, a file for each file of the source, in the order of its rows."""

    kind: Literal["openai_batch"] = "openai_batch"
    path: Place
    """The folder, empty or written by the same export; the results of `a.jsonl` are in `a.jsonl.results.jsonl`."""


class LanceExportConfig(Section):
    """A column of a Lance dataset, merged by `source.id_column`."""

    kind: Literal["lance"] = "lance"
    path: Place
    """The dataset, which gets new versions; it has the column `source.id_column`."""
    column: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] = "caption"
    """The column of captions."""
    existing: Literal["refuse", "overwrite"] = "refuse"
    """If the dataset has the column, and this export has not made it: refuse, or replace it."""


class TarExportConfig(Section):
    """New tars in the layout of img2dataset: of each row an image, `KEY.txt` with the caption or prompt, and
    `KEY.json`. Images of captions are read again from the source."""

    kind: Literal["tars"] = "tars"
    path: Place
    """The folder of the tars, empty or written by the same export."""
    columns: tuple[str, ...] = ()
    """Columns of the output in the JSON member; by default ids, method, and of images seed and sampling values."""


class FileExportConfig(Section):
    """Loose image files with a text file beside each, named by the ids of rows."""

    kind: Literal["files"] = "files"
    path: Place
    """The folder, empty or written by the same export."""
    text: Literal["none", "txt", "json"] = "txt"
    """The file beside an image: none, the caption or prompt, or an object of `columns`."""
    columns: tuple[str, ...] = ()
    """Columns of the output in the object; by default those of `tars`."""


class ImageFolderExportConfig(Section):
    """Folders of images with `metadata.jsonl`, which `datasets.load_dataset("imagefolder", …)` opens."""

    kind: Literal["imagefolder"] = "imagefolder"
    path: Place
    """The folder, empty or written by the same export."""
    columns: tuple[str, ...] = ()
    """Columns of the output in `metadata.jsonl`; by default those of `tars`."""


ImageExportConfig = TarExportConfig | FileExportConfig | ImageFolderExportConfig
"""Exports of images with their texts: images of the source, or those that the job made."""

ExportConfig = Annotated[
    SidecarExportConfig
    | DatasetExportConfig
    | WebDatasetExportConfig
    | OpenAIBatchExportConfig
    | LanceExportConfig
    | ImageExportConfig,
    Field(discriminator="kind"),
]


class ChecksConfig(Section):
    """Checks of each text, whose failures the column [`failed_checks`](../guides/caption.md#checks) has by code; rows
    without any failure pass."""

    empty: bool = True
    """`empty`: the text is blank."""
    looped: bool = True
    """`looped`: the text ended in a repetition, which `sampling.stop_loops` looks for."""
    min_characters: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """`too_short`: the text has fewer characters, without white space around it."""
    min_words: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """`too_short`: the text has fewer words, which white space separates."""
    # Not strict, because a list is validated as Python data by overrides.
    scripts: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]{1,64}$")], ...], Field(max_length=64)] = ()
    """`wrong_script`: too few letters are of these scripts, by their names in Unicode, such as `[Latin]` or
    `[Han, Hiragana, Katakana]`."""
    min_script_share: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Minimum share of letters of `scripts` among the characters that have a script of their own; texts without any
    pass."""
    python: ExternalName | None = None
    """`python`: a [function of yours](../guides/extend.md), `module:function`, returns False for the text."""


class RetryConfig(Section):
    """Further attempts of rows that fail `checks`, with [sampling of their own](../guides/caption.md#retries)."""

    max_attempts: Annotated[int, Field(ge=1, le=64)] = 1
    """Maximum number of further attempts of a row."""
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """In place of the row's temperature; required if that may be 0, at which attempts would be equal."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """In place of the row's `top_k`."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """In place of the row's `top_p`."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """In place of the row's `min_p`."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    """In place of the row's `repetition_penalty`."""
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=64)] | None = None
    """In place of the row's `no_repeat_ngram_size`."""

    @property
    def options(self) -> dict[str, Any]:
        """The fields of `decoding.Sampling` that further attempts replace."""
        return self.model_dump(exclude={"max_attempts"}, exclude_none=True)


class ExportJobConfig(Section):
    """The job file of `python -m jobs.export`."""

    exports: Annotated[tuple[ExportConfig, ...], Field(min_length=1)]
    """Forms in which results are exported; see [exports](../guides/output.md#exports)."""
