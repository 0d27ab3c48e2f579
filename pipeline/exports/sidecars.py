"""Writes a text or JSON file beside each listed image or video.

`a/b.jpg` gets `a/b.txt` or `a/b.jpg.txt`, and a clip of `a/b.mp4` gets `a/b@0-5.txt`. Every file is read, changed and
written as a function of its content and of the caption alone, so writing it again changes nothing.
"""

from __future__ import annotations

import errno
import json
import posixpath
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.compute as pc

from configs.load import ConfigError
from configs.output import CAPTION_COLUMN, SidecarExportConfig
from files.local import OutsideRoots
from pipeline.exports.ledger import ExportLedger, ExportPart, PartOutcome, Refusal
from pipeline.exports.rows import (
    as_json,
    check_columns,
    hash_of,
    in_threads,
    is_listed,
    json_bytes,
    manifest_of,
    parts_of,
    read_rows,
    reason,
    rows_of,
)
from pipeline.media.video.clips import Span
from pipeline.output.recorded_job import RecordedJob
from pipeline.storage.folders import FolderId
from pipeline.storage.output_dir import OutputDir
from pipeline.storage.tree import Tree, refuse_name

MAX_EXISTING_BYTES = 16 * 1024**2
"""Maximum number of bytes of a file to which a caption is appended."""
MAX_TRIES = 3
"""Attempts to append to a file that another process creates at the same time."""
MAX_PROBED = 20
"""Maximum number of listed files of which one must exist before sidecars are written."""
ROW_S = 2e-3
KINDS = ("images", "videos")
_CLIP = ("clip_start_s", "clip_end_s")


@dataclass(frozen=True)
class Sidecars:
    """The export of sidecars; `has_clips` if a video has one row per clip."""

    output: OutputDir
    tree: Tree
    config: SidecarExportConfig
    has_clips: bool
    listing: str
    rows_per_file: int
    folders: tuple[FolderId, ...] = ()
    """Source roots that attempts of the job have read."""
    listed: tuple[str, ...] = ()
    """Some files of the manifest."""

    @classmethod
    def of(cls, job: RecordedJob[Any], config: SidecarExportConfig, dotted: str) -> Sidecars:
        """Check the job; ConfigError for a source whose rows are no listed files, and for names that collide."""
        kind = job.config.source.kind
        if kind not in KINDS:
            advice = "kind webdataset add captions to tars" if kind == "webdataset" else "kind dataset take all sources"
            raise ConfigError(
                f"{dotted}: sidecars are written beside files that are one sample each, and source.kind is {kind!r}; "
                f"exports of {advice}"
            )
        if (number := job.config.sampling.num_captions_per_prompt) > 1:
            raise ConfigError(
                f"{dotted}: a sample of the job has {number} captions (sampling.num_captions_per_prompt), and a "
                "sidecar has one; exports of kind dataset take all"
            )
        check_columns(job, config.columns if config.format == "json" else (), f"{dotted}.columns")
        if config.names == "stem":
            _refuse_collisions(job.manifest.files["path"], dotted)
        tree = Tree(job.source_root(), "source.path")
        clips, rows = job.config.source.video.cuts, job.config.sink.rows_per_file
        paths = job.manifest.files["path"]
        some = tuple(paths[number * len(paths) // MAX_PROBED].as_py() for number in range(min(MAX_PROBED, len(paths))))
        if len(paths) < MAX_PROBED:
            some = tuple(paths.to_pylist())
        return cls(job.output, tree, config, clips, hash_of(job.manifest), rows, job.source_folders, some)

    @property
    def folder_id(self) -> FolderId | None:
        """The identity of a local source root."""
        return self.tree.identity

    def check(self, ledger: ExportLedger) -> None:
        """Check that files can be written; ConfigError if not, or if the root is not the folder that the job read."""
        where = f"{self.tree.dotted}: {self.tree.shown()}"
        ledger.refuse_moved(self.folder_id, self.folders, where)
        if not any(self.tree.filesystem.exists(self.tree.path(path)) for path in self.listed):
            raise ConfigError(
                f"{where} has none of the files that the job read, such as {self.listed[0]}; sidecars are written "
                "beside them: move them back"
            )
        self.tree.check_writable(creates=self.config.existing != "overwrite")

    def parts(self) -> list[ExportPart]:
        return parts_of(self.output, ROW_S, self.rows_per_file)

    def export(self, name: str) -> PartOutcome:
        """Write the sidecars of the rows of a published file."""
        columns = (CAPTION_COLUMN, *(self.config.columns if self.config.format == "json" else ()))
        table = read_rows(self.output, name, (*columns, *(_CLIP if self.has_clips else ())))
        listed = is_listed(table, manifest_of(self.output, self.listing))
        written, existing, refused = 0, 0, []
        for result in in_threads(self._write, zip(rows_of(table), listed, strict=True)):
            if isinstance(result, Refusal):
                refused.append(result)
            else:
                written, existing = written + result, existing + (not result)
        return PartOutcome(written, existing, tuple(refused))

    def finish(self, ledger: ExportLedger) -> None:
        """Sidecars have no common file."""

    def _write(self, item: tuple[dict[str, Any], bool]) -> bool | Refusal:
        """Write the sidecar of one row; return whether its file was changed, or why the row is refused."""
        row, is_known = item
        refuse = partial(Refusal, row["sample_id"], row["source"])
        if not is_known:
            return refuse("export_refused", "its source is no listed file of the job")
        try:
            return self._put(self._name(row), row)
        except OutsideRoots as error:
            return refuse("export_refused", reason(error))
        except OSError as error:
            return refuse("export_failed", reason(error))

    def _name(self, row: dict[str, Any]) -> str:
        stem = row["source"]
        refuse_name(stem)
        if self.config.names == "stem":
            stem = posixpath.splitext(stem)[0]
        span = Span(None, None, *(row[name] for name in _CLIP)) if self.has_clips else None
        return f"{stem}{span.name('') if span else ''}.{self.config.format}"

    def _put(self, relative: str, row: dict[str, Any]) -> bool:
        if self.config.format == "json":
            value = as_json(row, self.config.columns)
            new = json_bytes(value) + b"\n"
        else:
            value, new = None, (row[CAPTION_COLUMN] + "\n").encode()
        if self.config.existing == "overwrite":
            self.tree.replace(relative, new)
            return True
        for _ in range(MAX_TRIES):
            old = self.tree.read(relative, MAX_EXISTING_BYTES) if self.config.existing == "append" else None
            if old is None:
                if self.tree.create(relative, new):
                    return True
                if self.config.existing == "skip":
                    return False
                continue
            joined = _with_line(old, new) if self.config.format == "txt" else _with_object(old, value)
            if joined != old:
                self.tree.replace(relative, joined)
            return joined != old
        raise FileNotFoundError(2, "it was created and removed by another process meanwhile")


def _with_line(old: bytes, line: bytes) -> bytes:
    """Return `old` with `line` at its end, unless `old` contains it as whole lines."""
    old_lines = old if old.endswith(b"\n") or not old else old + b"\n"
    return old if b"\n" + line in b"\n" + old_lines else old_lines + line


def _with_object(old: bytes, value: Any) -> bytes:
    """Return a JSON list of the objects in `old` and of `value`, or `old` if it contains `value`."""
    try:
        parsed = json.loads(old)
        if not isinstance(parsed, list | dict):
            raise ValueError
        objects = parsed if isinstance(parsed, list) else [parsed]
        return old if value in objects else json_bytes([*objects, value]) + b"\n"
    except (ValueError, RecursionError):
        message = "the file is no JSON object or list, to which an object could be appended"
        raise OSError(errno.EINVAL, message) from None


def _refuse_collisions(paths: Any, dotted: str) -> None:
    """Raise ConfigError if two listed files have the same stem."""
    stems = pc.replace_substring_regex(paths, r"\.[^./]*$", "")
    counts = pc.value_counts(stems)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        names = paths.filter(pc.equal(stems, repeated[0])).to_pylist()[:2]
        raise ConfigError(
            f"{dotted}.names: {' and '.join(names)} have the same stem, so their sidecars would have one name "
            f"({len(repeated):,} such stems); set names: full"
        )
