"""Reads the source kind `coco`: files of annotations in COCO's format, of which each image is a sample.

A row has the keys of an object of `images`, and `captions`: the captions that `annotations` has for the image's `id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.formats.json import Json
from pipeline.formats.json_values import find_array, split_array
from pipeline.formats.kind import Entry, Needs, ReadSpec
from pipeline.formats.lines import Record, open_bytes
from pipeline.formats.nested import holders
from pipeline.formats.records import Row
from pipeline.formats.tables import needed_columns
from pipeline.rows.schemas import RowError
from pipeline.storage import access

CAPTIONS = "captions"
DEPTH = 2
"""Number of open brackets around the images."""
MAX_CAPTION_BYTES = 512 * 1024 * 1024
"""Maximum memory of a file's captions."""
CAPTION_BYTES = 200
"""Memory of a caption besides its text, about."""


class Coco(Json):
    """Parses the images of a file, and joins the captions of its annotations."""

    name = "coco"
    added_names = frozenset({CAPTIONS})

    def dialect(self, filesystem: Any, source: SourceConfig, path: str) -> str:
        return ""

    def check(self, filesystem: Any, path: str, needs: Needs, name: str) -> None:
        """Raise ConfigError if the job needs captions and those of a readable file cannot be joined."""
        if (
            dotted := next((needs.columns()[column] for column in needs.columns() if _is_captions(column)), None)
        ) is None:
            return
        try:
            self.captions(filesystem, path)
        except ValueError as error:
            raise ConfigError(f"{dotted}: {name}: its captions cannot be read: {error}") from None
        except Exception:  # the read task reports the error
            return

    def records(self, stream: Any, dialect: str, entry: Entry, cut: int | None = None) -> Iterator[Record]:
        if not entry.offset:
            stream, entry = find_array(stream, "images")
            yield Record(1, b"", entry.offset, entry.line - 1)
        yield from split_array(stream, entry, DEPTH, self.max_bytes)

    def parser(self, filesystem: Any, spec: ReadSpec, path: str) -> Callable[[Record], Row]:
        names = needed_columns(spec)
        captions = self.captions(filesystem, path) if any(map(_is_captions, names)) else None

        def parse(record: Record) -> Row:
            value = self.parse(record)
            if captions is not None:
                value.setdefault(CAPTIONS, captions.get(str(value.get("id")), []))
            return {name: value[name] for name in holders(names, value)}

        return parse

    def captions(self, filesystem: Any, path: str) -> dict[str, list[str]]:
        """Return the captions of a file by image; ValueError if the annotations are damaged or too many."""
        with access.open_file(filesystem, path) as file:
            size_bytes = access.size_of(file)
        return _captions_of(self, filesystem, path, size_bytes)


@lru_cache(maxsize=1)
def _captions_of(form: Coco, filesystem: Any, path: str, size_bytes: int) -> dict[str, list[str]]:
    """Implementation of `Coco.captions`, once for all pieces of a file that a process reads."""
    captions: dict[str, list[str]] = {}
    num_bytes = 0
    with open_bytes(filesystem, path) as stream:
        annotations = split_array(*find_array(stream, "annotations"), DEPTH, form.max_bytes)
        for record in annotations:
            if record.is_blank:
                continue
            try:
                annotation = form.parse(record)
            except RowError as error:
                raise ValueError(error.message) from None
            caption, image_id = annotation.get("caption"), annotation.get("image_id")
            if not isinstance(caption, str) or image_id is None:
                continue  # of a box or of key points
            num_bytes += CAPTION_BYTES + len(caption)
            if num_bytes > MAX_CAPTION_BYTES:
                raise ValueError(f"they take more than {MAX_CAPTION_BYTES} bytes")
            captions.setdefault(str(image_id), []).append(caption)
    return captions


def _is_captions(column: str) -> bool:
    return column.partition(".")[0] == CAPTIONS


KIND = Coco().kind
