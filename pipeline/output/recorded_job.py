"""Reads what a job has recorded in its output (configuration, target revision, manifest) and its results, and
finds the rows of its source that they answer."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from configs.load import ConfigError, validate
from configs.schema import CaptionJobConfig, SamplingConfig
from configs.source import with_older
from configs.synthesis import SynthesizeJobConfig
from files.installation import command
from pipeline.manifest.done_bitmap import DoneBitmap, PathIndex
from pipeline.manifest.freezing import list_source, open_listing
from pipeline.manifest.id_hashes import Hashes, hash_ids
from pipeline.manifest.manifest import Manifest
from pipeline.manifest.manifest_parts import read_parts
from pipeline.output.accounts import locate
from pipeline.output.files import Found, list_published, read_all_found
from pipeline.storage import access
from pipeline.storage.first_touch import check_stores
from pipeline.storage.folders import FolderId
from pipeline.storage.listing import Skipped
from pipeline.storage.output_dir import DATA, OutputDir
from pipeline.storage.parquet_files import DamagedParquet, open_parquet
from pipeline.storage.retries import planning
from pipeline.storage.shard import Shard

MAX_NAMED = 3
SOURCE_FOLDER = "source_folder"
"""The key of the identity of the source's local root in the record of an attempt."""
PLACE = ("source", "row_index")
"""Columns of a result that identify its row of the source."""


def keys_of(rows: pa.Table, salt: str = "") -> Hashes:
    """Return the hash of each row's place in the source, from its columns `PLACE`, and of `salt`."""
    parts: list[Any] = [rows[name].combine_chunks().cast(pa.large_string()) for name in PLACE]
    if salt:
        parts.insert(0, pa.scalar(salt, pa.large_string()))
    return hash_ids(pc.binary_join_element_wise(*parts, pa.scalar("\n", pa.large_string())))


Config = TypeVar("Config", bound=CaptionJobConfig | SynthesizeJobConfig)


@dataclass(frozen=True)
class RecordedJob(Generic[Config]):
    """The record of a job that makes captions or images: its output, the views of its shards (or the output alone), its
    newest configuration with fingerprint and target revision, and its manifest. `special_tokens` is that of the
    recorded revisions (`actors.loading.pair`)."""

    output: OutputDir
    views: tuple[OutputDir, ...]
    config: Config
    fingerprint: str
    target_revision: str
    manifest: Manifest
    source_folders: tuple[FolderId, ...] = ()
    """Identities of the source's local root when attempts read it."""
    special_tokens: str | None = None
    columns: tuple[str, ...] = ()
    """Columns of rows of images; empty for captions, and while no image is published."""
    source_code: str = ""
    """Name and SHA-256 of the external code of `source.kind`; empty if it is a built-in kind."""
    check_code: str = ""
    """The same of `checks.python`; empty without one."""
    target_adapter: str = ""
    """Digest of the adapter of the target; empty without one."""

    @property
    def makes_images(self) -> bool:
        """Whether the results are images."""
        return isinstance(self.config, SynthesizeJobConfig)

    @property
    def multiplies_rows(self) -> bool:
        """Whether a sample may have several rows."""
        if isinstance(self.config, SynthesizeJobConfig):
            return self.config.sampling.num_images_per_prompt > 1
        return self.config.multiplies_rows

    def results(self, columns: Sequence[str], dotted: str) -> Iterator[pa.Table]:
        """Yield the results of every published file, by `columns` that it has; raise ConfigError, which names `dotted`,
        if a file is damaged or was made by another configuration."""
        for view in self.views:
            for file in read_all_found(view, list_published(view, DATA), columns):
                yield self.checked(file, dotted)

    def checked(self, file: Found, dotted: str) -> pa.Table:
        """Return the table of a file that was read; raise ConfigError as `results`."""
        if file.table is None:
            raise ConfigError(
                f"{dotted}: {self.output.shown(file.relative)}: {file.problem}; `{shlex.join(command('check'))}` "
                "lists the damaged files, and the job's own command makes their rows again"
            )
        if file.table.num_rows and file.fingerprint != self.fingerprint:
            how = f"{file.relative} was made by config {file.fingerprint}, not {self.fingerprint}"
            raise mixed(self.output, dotted, how)
        return file.table

    def inside(self, rows: pa.Table) -> pa.Table:
        """Return the rows (columns `PLACE`) of the manifest; a job that resumes may have listed further files since."""
        if not rows.num_rows:
            return rows
        [located] = locate([rows], PathIndex(self.manifest.files["path"]))
        return rows.filter(pa.array(DoneBitmap(self.manifest.counts).is_inside(located.files, located.rows)))

    def files_of(self, rows: pa.Table) -> Manifest:
        """Return the manifest of the files of `rows` (columns `PLACE`), without kept columns and shards."""
        [located] = locate([rows], PathIndex(self.manifest.files["path"]))
        files = self.manifest.files.take(pa.array(np.unique(located.files[located.files >= 0])))
        return Manifest(self.manifest.root, files.combine_chunks(), pa.schema([]))

    def source_root(self) -> str:
        """Return the root of the source as a URL; raise ConfigError if the source is gone."""
        source = self.config.source
        filesystem, root, _ = open_listing(source, Skipped())
        return access.unstripped(filesystem, root)

    def reopened(self, manifest: Manifest) -> Manifest:
        """Return a part of the job's manifest with the current root of the source; raise ConfigError if one of its
        files is gone or has changed since the job read it."""
        source = self.config.source
        try:
            filesystem, root, listing = list_source(source, Skipped())
        except ConfigError as error:
            raise ConfigError(f"{error}\n(it is the source of the job in {self.output.shown()})") from None
        indices = PathIndex(listing["path"]).find(manifest.files["path"].combine_chunks())
        _refuse_files(manifest, indices < 0, f"gone, and the job in {self.output.shown()} has read")
        now = listing.take(pa.array(indices))
        differ = np.zeros(manifest.num_files, bool)
        for name in ("size_bytes", "token"):
            pairs = zip(manifest.files[name].to_pylist(), now[name].to_pylist(), strict=True)
            differ |= np.fromiter((old != new for old, new in pairs), bool, manifest.num_files)
        _refuse_files(manifest, differ, f"other (size, etag or time) than when the job in {self.output.shown()} read")
        return replace(manifest, root=access.unstripped(filesystem, root))


def rows_without(rows: pa.Table, manifest: Manifest) -> DoneBitmap:
    """Return the samples of the manifest other than `rows` (columns `PLACE`), which are not read."""
    [located] = locate([rows], PathIndex(manifest.files["path"]))
    return DoneBitmap.all_but(manifest.counts, located.files, located.rows)


def _refuse_files(manifest: Manifest, wrong: Any, what: str) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        names = ", ".join(manifest.files["path"][row].as_py() for row in rows[:MAX_NAMED].tolist())
        more = f" and {len(rows) - MAX_NAMED:,} more" if len(rows) > MAX_NAMED else ""
        raise ConfigError(f"source.path: {names}{more}: {what} it; results belong to the rows that they were made from")


def read_job(path: str, dotted: str) -> RecordedJob[CaptionJobConfig]:
    """Read the record of the caption job in `path`, which is the value of the field `dotted`.

    Raises:
        ConfigError: there is no output of a caption job, it cannot be read, or its shards have several configurations.
    """
    return _read_recorded(path, dotted, takes_images=False)


@planning()
def read_any_job(path: str, dotted: str) -> RecordedJob[Any]:
    """Read the record of the caption or synthesis job in `path`, as `read_job`."""
    return _read_recorded(path, dotted, takes_images=True)


def _read_recorded(path: str, dotted: str, takes_images: bool) -> RecordedJob[Any]:
    check_stores(dotted, [path])
    output = OutputDir(path)
    try:
        return _read(output, dotted, takes_images)
    except ConfigError as error:
        raise ConfigError(str(error).replace("sink.path", dotted, 1)) from None
    except Exception as error:  # drivers raise errors of no common class
        raise ConfigError(f"{dotted}: {output.shown()} cannot be read: {access.reason_of(error, path)}") from None


def _read(output: OutputDir, dotted: str, takes_images: bool) -> RecordedJob[Any]:
    manifest = read_parts(output)
    views = [output]
    if manifest is not None and manifest.num_shards > 1:
        views = [replace(output, shard=Shard(number, manifest.num_shards)) for number in range(manifest.num_shards)]
    newest = {view: max(numbers) for view in views if (numbers := view.list_attempts())}
    if manifest is None or not newest:
        raise ConfigError(
            f"{dotted}: {output.shown()} is no output of a job: it holds no manifest and attempts in _job/; name "
            "the sink.path of a job"
        )
    records = {view: view.read_attempt(number) for view, number in newest.items()}
    fingerprints = {str(record.get("config_fingerprint")) for record in records.values()}
    if len(fingerprints) > 1:
        raise mixed(output, dotted, f"its shards have the configs {', '.join(sorted(fingerprints))}")
    record = next(iter(records.values()))
    data = record.get("config")
    where = f"{dotted}: the record of the job in {output.shown()}"
    if not isinstance(data, dict):
        raise ConfigError(f"{where} has no configuration; it was made by an old version")
    makes_images = "num_images_per_prompt" in data.get("sampling", {})
    if makes_images and not takes_images:
        raise ConfigError(
            f"{dotted}: {output.shown()} is the output of a synthesis job, and texts are in outputs of "
            "caption jobs; its rows are read with source.kind parquet"
        )
    if not makes_images and isinstance(data.get("sampling"), dict):
        # A key that the job did not have yet is at its default, and not the target's generation setting.
        data["sampling"] = SamplingConfig().model_dump(mode="json") | data["sampling"]
    data["source"] = with_older(data.get("source"))
    revisions = record.get("content", {}).get("revisions", {})
    model: Any = SynthesizeJobConfig if makes_images else CaptionJobConfig
    config = validate(model, data, where, recorded=True)
    known = (fingerprints.pop(), str(revisions.get("target")), manifest)
    folders = source_folders(records.values())
    return RecordedJob(
        *(output, tuple(newest), config, *known),
        folders,
        special_tokens=revisions.get("special_tokens"),
        columns=_published_columns(views) if makes_images else (),
        source_code=revisions.get("source.kind", ""),
        check_code=revisions.get("checks.python", ""),
        target_adapter=revisions.get("target_adapter", ""),
    )


def _published_columns(views: Iterable[OutputDir]) -> tuple[str, ...]:
    """Return the columns of the first published file that can be read; empty if there is none."""
    for view in views:
        for name in list_published(view, DATA):
            try:
                with open_parquet(view.filesystem, view.path(name)) as parquet:
                    return tuple(parquet.schema_arrow.names)
            except (DamagedParquet, FileNotFoundError):
                continue
    return ()


def source_folders(records: Iterable[Mapping[str, Any]]) -> tuple[FolderId, ...]:
    """Return the identities of the source's local root in records of attempts, which old records do not have."""
    folders = (FolderId.parse(record.get(SOURCE_FOLDER)) for record in records)
    return tuple(folder for folder in folders if folder is not None)


def mixed(output: OutputDir, dotted: str, how: str) -> ConfigError:
    """Return the error of an output whose rows were made by several configurations."""
    return ConfigError(
        f"{dotted}: {output.shown()} mixes configurations ({how}), so its rows have no common prompt and target; "
        "name the output of one configuration"
    )
