"""Lists and surveys a source, and freezes the result as a manifest."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.load import ConfigError
from configs.source import SourceConfig
from pipeline.cluster.partitions import IN_PROCESS, Workers
from pipeline.formats import kind_of
from pipeline.formats.kind import Needs, no_row_groups
from pipeline.formats.uris import Fetcher
from pipeline.manifest.manifest import LISTING, SCHEMA, Manifest
from pipeline.manifest.manifest_checks import problem_of_files
from pipeline.manifest.survey import repeated_rows, survey
from pipeline.prompts import templates
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import find_read, find_reserved
from pipeline.storage import access
from pipeline.storage.listing import Listed, Skipped, describe_skipped, list_paths
from pipeline.storage.output_dir import OutputDir

MAX_REPEATED_ROWS = 1000
"""Maximum number of rows with a repeated id: this number or half of all rows, whichever is larger."""
_LISTING_CHUNK = 65_536


def needs_of(
    source: SourceConfig, prompt_options: PromptOptions, keep_columns: Sequence[str] | Mapping[str, str]
) -> Needs:
    """Return the columns that a job reads.

    `keep_columns` as a mapping gives the dotted path for each column; these columns are not written to the output.

    Raises:
        ConfigError: the prompt has a lone brace or no turn for images, or a kept name occurs twice or is reserved.
    """
    fields = prompt_options.fields()
    if isinstance(keep_columns, Mapping):
        for name in find_read(tuple(keep_columns)):
            raise ConfigError(f"{keep_columns[name]}: {name!r} is a name of our own; rename the column in the source")
        return Needs(source, fields, tuple(keep_columns), dict(keep_columns))
    for name in find_reserved(keep_columns):
        raise ConfigError(f"sink.keep_columns: {name!r} is a column of the output itself; rename it in the source")
    if len({name.lower() for name in keep_columns}) != len(keep_columns):
        raise ConfigError("sink.keep_columns: a column is named twice (upper and lower case are the same here)")
    for what, column in (("image", source.columns.image), ("video", source.columns.video)):
        if source.kind in ("images", "videos", "text") and column is not None:
            raise ConfigError(f"source.columns.{what}: source.kind {source.kind!r} has no {what} column")
    return Needs(source, fields, tuple(keep_columns))


def freeze(
    source: SourceConfig,
    prompt_options: PromptOptions,
    keep_columns: Sequence[str] | Mapping[str, str] = (),
    output: OutputDir | None = None,
    workers: Workers = IN_PROCESS,
) -> Manifest:
    """List the source, survey its files, and write the manifest if there is an output.

    Raises:
        ConfigError: the source is missing or empty, or the prompt or the kept columns do not fit it; names the path.
    """
    manifest = freeze_for(needs_of(source, prompt_options, keep_columns), workers)
    if output is not None:
        manifest.write(output)
    return manifest


def freeze_for(needs: Needs, workers: Workers = IN_PROCESS) -> Manifest:
    """List the source and survey its files; raises ConfigError like `freeze`."""
    skipped = Skipped()
    filesystem, root, files = list_source(needs.source, skipped)
    _check_media_root(needs.source, access.unstripped(filesystem, root))
    manifest = replace(survey_files(filesystem, root, files, needs, workers), skipped=dict(skipped.counts))
    if manifest.num_samples == 0:
        raise ConfigError(f"source.path: the files at {_source_name(needs.source)} hold no rows")
    return manifest


def _check_media_root(source: SourceConfig, root: str) -> None:
    """Raise ConfigError if `source.media_root` is a local folder that does not exist, or cannot be opened."""
    if source.media_root is not None:
        filesystem, path = access.open_url(Fetcher(source, root).media_root, "source.media_root")
        if access.is_local(filesystem) and not filesystem.isdir(path):
            raise ConfigError(f"source.media_root: {access.shown(path)} is no folder; it is relative to {root}")


def list_source(source: SourceConfig, skipped: Skipped) -> tuple[Any, str, pa.Table]:
    """List the source; return its file system, the root path in that file system, and the sorted `LISTING`.

    Files in the source's folders that its kind does not read are counted in `skipped`.

    Raises:
        ConfigError: the source is missing or empty.
    """
    kind = kind_of(source.kind)
    filesystem, root, listing = open_listing(source, skipped)
    with _listing_errors(source):
        files = _table(listing)
    if not files.num_rows and kind.other_suffixes:
        others = Skipped()
        filesystem, root, listing = open_listing(source, others, kind.other_suffixes)
        with _listing_errors(source):
            files = _table(listing)
        if files.num_rows:
            skipped.counts = others.counts
    if not files.num_rows:
        raise ConfigError(
            f"source.path: nothing to read at {_source_name(source)}; source.kind {source.kind!r} reads "
            f"{', '.join('*' + suffix for suffix in kind.suffixes)} in folders, and whatever a glob or a file names"
            + (f"; there are {describe_skipped(skipped.counts, source.kind)}" if skipped.counts else "")
        )
    return filesystem, root, files


def open_listing(
    source: SourceConfig, skipped: Skipped, suffixes: tuple[str, ...] = ()
) -> tuple[Any, str, Iterator[Listed]]:
    """Return the file system of a source, the root path in it, and an iterator over its files, in no order; files in
    folders have one of the `suffixes`, by default the kind's.

    Raises:
        ConfigError: the source is missing.
    """
    kind = kind_of(source.kind)
    opened = [access.open_url(path, "source.path") for path in source.paths]
    filesystem, paths = opened[0][0], [path for _, path in opened]
    if any(other is not filesystem for other, _ in opened):
        raise ConfigError("source.path: all paths of a source must be in one store; start a job for each store")
    list_units = kind.list_units or functools.partial(
        list_paths, suffixes=suffixes or kind.suffixes, skipped=skipped, local_roots=source.local_roots
    )
    with _listing_errors(source):
        root, listing = list_units(filesystem, paths)
    return filesystem, root, listing


@contextlib.contextmanager
def _listing_errors(source: SourceConfig) -> Iterator[None]:
    """Convert any failure to list a source to a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # drivers raise errors of no common class
        where = getattr(error, "filename", None) or _source_name(source)
        reason = access.reason_of(error, source.paths[0])
        raise ConfigError(f"source.path: {access.shown(str(where))} cannot be listed: {reason}") from None


def _source_name(source: SourceConfig) -> str:
    return " and ".join(access.shown(path) for path in source.paths)


def survey_files(
    filesystem: Any, root: str, files: pa.Table, needs: Needs, workers: Workers, earlier: Manifest | None = None
) -> Manifest:
    """Run the kind's survey on the listed files; ids are also compared with the files of the manifest `earlier`.

    Raises:
        ConfigError: the files lack a needed column, or most ids occur several times.
    """
    result = survey(filesystem, root, files, needs, workers)
    files = pa.table([*files.columns, *result.facts.columns, no_row_groups(files.num_rows)], schema=SCHEMA)
    if problem := problem_of_files(files):
        raise ConfigError(f"source.path: {problem}")
    surveyed = Manifest(access.unstripped(filesystem, root), files, result.keep)
    both = surveyed if earlier is None else replace(surveyed, files=pa.concat_tables([earlier.files, files]))
    compared = with_repeated_rows(filesystem, root, needs.source, both, workers)
    return replace(surveyed, files=compared.files.slice(both.num_files - files.num_rows))


def with_repeated_rows(
    filesystem: Any, root: str, source: SourceConfig, manifest: Manifest, workers: Workers
) -> Manifest:
    """Compare the ids of all files and set the column `repeated_rows` of files that are in no part yet; return the
    manifest unchanged if ids are not checked before the job.

    Raises ConfigError if more than `MAX_REPEATED_ROWS` rows and more than half of all rows repeat an id.
    """
    if source.id_column is None or not source.check_ids or not kind_of(source.kind).has_cheap_ids:
        return manifest
    repeats = repeated_rows(filesystem, root, source, manifest, workers)
    num_repeated, num_rows = repeats.num_rows, pc.sum(manifest.files["num_samples"]).as_py() or 0
    if num_repeated > max(MAX_REPEATED_ROWS, num_rows // 2):
        raise ConfigError(
            f"source.id_column: {source.id_column!r} is no id: {num_repeated:,} of {num_rows:,} rows have one that "
            "an earlier row has"
        )
    ends = np.cumsum(np.bincount(repeats["file"].to_numpy(), minlength=manifest.num_files))
    offsets = pa.array(np.append(0, ends), pa.int32())
    repeated = pa.ListArray.from_arrays(offsets, repeats["row"].combine_chunks())
    before = manifest.files["repeated_rows"].slice(0, manifest.written)
    position = SCHEMA.get_field_index("repeated_rows")
    column = pa.chunked_array([*before.chunks, repeated.slice(manifest.written)], SCHEMA.field(position).type)
    return replace(manifest, files=manifest.files.set_column(position, SCHEMA.field(position), column))


def _table(listing: Iterable[Listed]) -> pa.Table:
    """Convert files to a `LISTING` table sorted by the bytes of the path; ConfigError for a name that is not UTF-8."""
    batches = []
    stream = iter(listing)
    while chunk := list(islice(stream, _LISTING_CHUNK)):
        try:
            columns = zip(zip(*chunk, strict=True), LISTING.types, strict=True)
            batches.append(pa.record_batch([pa.array(values, kind) for values, kind in columns], schema=LISTING))
        except UnicodeEncodeError:
            bad = next(file.path for file in chunk if templates.whole_text(file.path) != file.path)
            raise ConfigError(
                f"source.path: the file name {bad.encode('utf-8', 'backslashreplace').decode()} is not valid UTF-8; "
                "rename the file"
            ) from None
    table = pa.Table.from_batches(batches, LISTING)
    paths = table["path"]
    if pc.all(pc.less(paths.slice(0, max(0, len(paths) - 1)), paths.slice(1))).as_py():
        return table  # object stores list in this order; sorting would take twice the memory
    return table.take(pc.sort_indices(paths)).combine_chunks()
