"""Image URIs inside rows: which are allowed, and fetching them. Knows no row and no image format."""

from __future__ import annotations

import posixpath
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.core import url_to_fs

from pipeline import storage
from pipeline.rows import RowError
from pipeline.sources.images import fetch
from pipeline.sources.kind import ReadSpec

NUM_FETCH_THREADS = 16


def locate(filesystem: Any, spec: ReadSpec, uri: str) -> tuple[Any, str]:
    """The file system and path of a URI; one without a scheme is relative to the source root and stays below it.

    Raises:
        RowError: `uri_refused` for a scheme outside `source.uri_schemes`, a chained URL, a path that leaves the root.
    """
    scheme = storage.uri_scheme(uri)
    if "::" in uri or "\0" in uri:
        raise RowError("uri_refused", f"{storage.shown(uri)!r} is no plain path or URL")
    if scheme:
        if scheme not in spec.source.uri_schemes:
            raise RowError("uri_refused", f"{storage.shown(uri)!r}: {scheme!r} is not in source.uri_schemes")
        try:
            return url_to_fs(uri)  # type: ignore[no-any-return]
        except Exception as error:
            reason = type(error).__name__
            raise RowError("unreadable_image", f"{storage.shown(uri)!r} cannot be opened: {reason}") from None
    if uri.startswith("/"):
        if "file" in spec.source.uri_schemes and storage.is_local(filesystem):
            return filesystem, uri
        raise RowError("uri_refused", f"{storage.shown(uri)!r} is absolute; paths are relative to the source root")
    relative = posixpath.normpath(uri)
    if relative == ".." or relative.startswith("../"):
        raise RowError("uri_refused", f"{storage.shown(uri)!r} leaves the source root")
    return filesystem, storage.join(spec.root, relative)


def fetch_all(filesystem: Any, spec: ReadSpec, uris: list[str]) -> list[bytes | RowError]:
    """Bytes or error for every URI, in order; several are under way at once."""

    def one(uri: str) -> bytes | RowError:
        try:
            where, path = locate(filesystem, spec, uri)
            return fetch(where, path, spec.source.max_image_bytes)
        except RowError as error:
            return error

    if len(uris) < 2:
        return [one(uri) for uri in uris]
    with ThreadPoolExecutor(min(NUM_FETCH_THREADS, len(uris))) as pool:
        return list(pool.map(one, uris))
