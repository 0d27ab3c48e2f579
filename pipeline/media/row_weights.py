"""Limits the decoded bytes per decoding task: computes row weights and inserts filler rows, so that Ray cuts by weight.

Ray cuts tables by rows, and a retry cuts at the same offsets. A row of weight n is preceded by n - 1 empty filler rows,
so a cut after k rows is a cut after weight k. A weight depends only on the configuration, on the headers of images in
the row, and on the maximum size of images that are fetched later; nothing is decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from ray.data import Datasource, ReadTask

from actors.media import FILLER_INDEX, without_fillers
from configs.source import SHARES, SourceConfig
from pipeline.media.image_size import size_of
from pipeline.media.pixels import fitting
from pipeline.media.video.clips import MediaOptions
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import RowError

if TYPE_CHECKING:
    from models.inputs.output_size import OutputSizes

CHANNELS = 3


def share_of(max_decoded_bytes: int) -> int:
    """Return one share in bytes: the limit of one row's pixels, and of its encoded media; a task gets no further rows
    when its rows together reach it."""
    return max(1, max_decoded_bytes // SHARES)


@dataclass(frozen=True)
class Weigher:
    """Computes row weights from bytes and the number of prompts; a task has rows of total weight `batch_rows`."""

    batch_rows: int
    share_bytes: int
    max_image_pixels: int
    max_side_px: int | None
    video_bytes: int
    clip_bytes: int
    prompt_options: PromptOptions
    outputs: OutputSizes | None = None
    """Sizes of processor outputs, if tasks run the processor."""
    keeps_pixels: bool = True
    """Whether pixels travel beside processor outputs."""

    @classmethod
    def of(
        cls,
        source: SourceConfig,
        batch_rows: int,
        prompt_options: PromptOptions,
        outputs: OutputSizes | None = None,
        keeps_pixels: bool = True,
    ) -> Weigher:
        """Build the weigher of a job on this source."""
        options = MediaOptions.of(source, "")
        sampling, limits = options.sampling, options.limits
        num_frames = sampling.num_frames or len(sampling.timestamps_s) or sampling.max_frames
        pixels = limits.max_pixels if limits.max_side_px is None else min(limits.max_pixels, limits.max_side_px**2)
        clip_bytes = min(limits.max_decoded_bytes, CHANNELS * pixels * num_frames)
        # The number of clips of a video is known only after decoding.
        video_bytes = clip_bytes if not sampling.cuts else limits.max_decoded_bytes
        share_bytes = share_of(source.max_decoded_bytes)
        sizes = (share_bytes, limits.max_pixels, limits.max_side_px, video_bytes, clip_bytes)
        return cls(batch_rows, *sizes, prompt_options, outputs, keeps_pixels)

    @property
    def rows_of_clips(self) -> int:
        """Number of rows per block if every clip has the maximum size."""
        return max(1, min(self.batch_rows, self.share_bytes // self.clip_bytes))

    def weights(self, table: pa.Table) -> list[int]:
        """Return the weight of each row of a READ table, from 1 to `batch_rows`."""
        return [1 if code else self._weight(table, index) for index, code in enumerate(table["error_type"].to_pylist())]

    def _weight(self, table: pa.Table, index: int) -> int:
        images, videos = media_of(table, index)
        num_prompts = 1
        if self.prompt_options.columns.prompts is not None or self.prompt_options.columns.messages is not None:
            try:
                fields = json.loads(table["fields"][index].as_py())
                prompts, images, videos = self.prompt_options.ask(fields, images, videos)
            except RowError:
                return 1
            num_prompts = len(prompts)
        media = [self._decoded_bytes(image) for image in images], [self.video_bytes] * len(videos)
        decoded = sum(map(sum, media))
        if self.outputs is not None:
            packed = self.outputs.packed_bytes(*media, num_prompts)
            decoded = decoded + packed if self.keeps_pixels else max(decoded, packed)
        encoded = sum(
            cell["bytes"].size for cell in (*images, *videos) if isinstance(cell, dict) and cell["bytes"] is not None
        )
        by_bytes: int = -(-max(decoded, encoded) * self.batch_rows // self.share_bytes)
        return max(1, min(self.batch_rows, max(by_bytes, num_prompts)))

    def _decoded_bytes(self, image: dict[str, Any] | str) -> int:
        """Return the bytes of an image's pixels; the maximum if its size is unknown before decoding."""
        data = None if isinstance(image, str) else image["bytes"]
        size = None if data is None else size_of(memoryview(data))
        if size is not None:
            width, height = fitting(*size, self.max_side_px)
            return CHANNELS * width * height
        max_pixels = self.max_image_pixels
        return CHANNELS * (max_pixels if self.max_side_px is None else min(max_pixels, self.max_side_px**2))

    def with_fillers(self, table: pa.Table) -> pa.Table:
        """Insert `weight - 1` filler rows before each row of a READ table."""
        weights = self.weights(table)
        if max(weights, default=1) == 1:
            return table
        fillers = _fillers(table.schema, self.batch_rows)
        parts, start = [], 0
        for index, weight in enumerate(weights):
            if weight > 1:
                parts += [table.slice(start, index - start), fillers.slice(0, weight - 1)]
                start = index
        return pa.concat_tables([*parts, table.slice(start)])


def media_of(table: pa.Table, index: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return images and videos of one READ row as dictionaries; encoded bytes are Arrow buffers without a copy."""

    def cells(column: str) -> list[dict[str, Any]]:
        items = table[column][index].values or ()
        return [
            {name: item[name].as_buffer() if name == "bytes" else item[name].as_py() for name in item} for item in items
        ]

    return cells("images"), cells("videos")


def _fillers(schema: pa.Schema, count: int) -> pa.Table:
    values: dict[str, Any] = {"sample_id": "", "source": "", "row_index": FILLER_INDEX, "fields": "{}"}
    values |= {"images": [], "videos": [], "messages": "", "sampling": "", "error_type": "", "error_message": ""}
    return pa.table({field.name: pa.array([values.get(field.name)] * count, field.type) for field in schema}, schema)


def padded(function: Callable[[pa.Table], pa.Table], num_rows: int) -> Callable[[pa.Table], pa.Table]:
    """Wrap a table function: fillers are removed from its input, and its output is filled up to `num_rows` rows."""

    def stage(table: pa.Table) -> pa.Table:
        output = function(without_fillers(table))
        missing = num_rows - output.num_rows
        return output if missing <= 0 else pa.concat_tables([output, _fillers(output.schema, missing)])

    return stage


class Weighed(Datasource):  # type: ignore[misc]
    """Wraps a datasource; its read tasks insert filler rows before rows of weight above 1."""

    def __init__(self, source: Datasource, weigher: Weigher) -> None:
        super().__init__()
        self._source, self._weigher = source, weigher

    def get_name(self) -> str:
        return str(self._source.get_name())

    def estimate_inmemory_data_size(self) -> int | None:
        return self._source.estimate_inmemory_data_size()  # type: ignore[no-any-return]

    def get_read_tasks(self, parallelism: int, *arguments: Any, **keywords: Any) -> list[ReadTask]:
        tasks: Sequence[ReadTask] = self._source.get_read_tasks(parallelism, *arguments, **keywords)
        return [_weighed(task, self._weigher) for task in tasks]


def _weighed(task: ReadTask, weigher: Weigher) -> ReadTask:
    def read_span() -> Iterator[pa.Table]:  # Ray names tasks by the function
        for table in task():
            yield weigher.with_fillers(table)

    return ReadTask(read_span, task.metadata, schema=task.schema)
