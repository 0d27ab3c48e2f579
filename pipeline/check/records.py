"""Finds damaged files among those that a job writes into `_job/`; changes nothing.

Files are compared with their recorded digests, which older versions did not record, and parsed. Logs, the report and
files that were set aside are not checked: they are appended to, or replaced while the job runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from configs.yaml_file import ConfigError, parse
from pipeline.manifest.manifest import PARTS
from pipeline.manifest.manifest_parts import COUNTS
from pipeline.output.checksums import is_one_of
from pipeline.output.files import CHECKSUMS, SPOOL
from pipeline.output.turns import TURNS, problem_of_turn
from pipeline.storage import access
from pipeline.storage.damage import DamagedFile, problem_of_record
from pipeline.storage.digests import DIGESTS, OTHER_BYTES, Digest
from pipeline.storage.output_dir import (
    ASIDE,
    ATTEMPTS,
    CONTENT,
    DATA,
    ERRORS,
    JOB,
    MAX_RECORD_BYTES,
    TEMPORARY,
    OutputDir,
)
from pipeline.storage.parquet_files import DamagedParquet, open_parquet

_ELSEWHERE = (CHECKSUMS, PARTS, SPOOL)
"""Folders that are checked with the manifest and the results."""
_UNCHECKED = (*_ELSEWHERE, ASIDE, COUNTS, DIGESTS, TEMPORARY, f"{JOB}/logs", f"{JOB}/shards")


def problems_of_records(output: OutputDir) -> Iterator[str]:
    """Yield one problem per damaged file in the `_job/` of an output or of the view of one shard."""
    recorded = output.digests()
    for name in sorted(recorded) if output.is_local else ():
        relative = name if name.startswith((f"{DATA}/", f"{ERRORS}/")) else f"{JOB}/{name}"
        if os.path.isdir(output.path(relative)):
            yield f"{relative}: it is a folder"
    for name in output.list_files(JOB):
        relative, digests = f"{JOB}/{name}", recorded.get(name, frozenset())
        is_checked = not relative.startswith(tuple(f"{folder}/" for folder in _UNCHECKED))
        if is_checked and (reason := _problem(output, relative, digests)):
            yield f"{relative}: {reason}"


def _problem(output: OutputDir, relative: str, digests: frozenset[Digest]) -> str:
    try:
        if digests and not is_one_of(output, relative, digests):
            return OTHER_BYTES
        return _problem_of_content(output, relative)
    except DamagedFile as error:
        return error.reason
    except FileNotFoundError:  # replaced or removed meanwhile
        return ""
    except (ValueError, OSError) as error:
        return access.reason_of(error)


def _problem_of_content(output: OutputDir, relative: str) -> str:
    """Return what is wrong with the content of a record, empty for nothing."""
    suffix = relative.rpartition(".")[2]
    if suffix == "parquet":
        try:
            with open_parquet(output.filesystem, output.path(relative)) as parquet:
                for _ in parquet.iter_batches():
                    pass
        except DamagedParquet as error:
            return f"it is torn: {error}"
    elif suffix == "yaml":
        return _problem_of_yaml(output.read_bytes(relative, MAX_RECORD_BYTES))
    elif suffix == "json":
        value: Any = output.read_json(relative)
        if relative.startswith(f"{TURNS}/"):
            return problem_of_turn(value)
        if relative.startswith(f"{ATTEMPTS}/") and relative.rpartition("/")[2].removesuffix(".json").isdecimal():
            return problem_of_record(value, relative)
        if relative == CONTENT and not isinstance(value, dict):
            return "it is no JSON object"
    return ""


def _problem_of_yaml(data: bytes) -> str:
    try:
        parse(data.decode(), "it")
    except ConfigError as error:
        return str(error)
    except UnicodeDecodeError:
        return "it is not UTF-8"
    return ""
