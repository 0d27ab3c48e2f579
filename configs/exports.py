"""Defines the exports of a caption job: forms of its results besides Parquet, and the job file of `jobs.export`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Place, Section

CAPTION_COLUMN = "generated_text"


class SidecarExport(Section):
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


class DatasetExport(Section):
    """A folder with Parquet files and a dataset card, which `datasets.load_dataset` opens."""

    kind: Literal["dataset"] = "dataset"
    path: Place
    """The folder, empty or written by the same export."""
    columns: tuple[str, ...] = ()
    """Columns of the output; by default `sample_id`, `source`, `generated_text` and those of `sink.keep_columns`."""
    images: Literal["none", "first", "all"] = "none"
    """Whether the first image of a row (column `image`), or all of them (column `images`), are read again and added."""
    title: Annotated[str, Field(min_length=1, max_length=200)] = "Captions"
    """The title of the dataset card."""


class WebDatasetExport(Section):
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


class LanceExport(Section):
    """A column of a Lance dataset, merged by `source.id_column`."""

    kind: Literal["lance"] = "lance"
    path: Place
    """The dataset, which gets new versions; it has the column `source.id_column`."""
    column: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] = "caption"
    """The column of captions."""
    existing: Literal["refuse", "overwrite"] = "refuse"
    """If the dataset has the column, and this export has not made it: refuse, or replace it."""


Export = Annotated[SidecarExport | DatasetExport | WebDatasetExport | LanceExport, Field(discriminator="kind")]


class ExportJob(Section):
    """The job file of `python -m jobs.export`."""

    exports: Annotated[tuple[Export, ...], Field(min_length=1)]
    """Forms in which results are exported; see [exports](../guides/output.md#exports)."""
