"""Checks URIs of media in rows and fetches them in parallel. A scheme must be in `source.uri_schemes`; a URI without
one is a path below `source.media_root`, by default the source root. Local files, with symlinks resolved, must be below
one of these or a folder of `source.local_roots`."""

from __future__ import annotations

import os
import posixpath
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

from configs.load import ConfigError
from configs.source import SourceConfig
from files.local import OutsideRoots
from pipeline.formats import web
from pipeline.formats.base64_text import read_data_uri
from pipeline.rows.schemas import RowError
from pipeline.storage import access
from pipeline.storage.folders import snapshot_blobs
from pipeline.storage.retries import RetryPolicy, retried

FIRST_WAIT_S = 0.5
Result = TypeVar("Result")


@dataclass(frozen=True)
class Fetcher:
    """Fetches the URIs of one source; `root` is the source root as a URL. Small when pickled."""

    source: SourceConfig
    root: str

    def fetch(self, uris: Iterable[str], max_bytes: int | None = None) -> dict[str, bytes | RowError]:
        """Return bytes or an error by URI; repeated URIs are fetched once."""
        names = list(dict.fromkeys(uris))
        limit = self.source.max_image_bytes if max_bytes is None else max_bytes

        def fetch_or_error(uri: str) -> bytes | RowError:
            try:
                return self._fetch(uri, limit)
            except RowError as error:
                return error

        with ThreadPoolExecutor(self.source.fetch.max_parallel) as pool:
            return dict(zip(names, pool.map(fetch_or_error, names), strict=True))

    def _fetch(self, uri: str, max_bytes: int) -> bytes:
        scheme = self.check(uri)
        if scheme == "data":
            return read_data_uri(uri, max_bytes)
        if scheme in ("http", "https"):
            return self._fetch_web(access.canonical(uri.strip()), max_bytes)

        def read(filesystem: Any, path: str) -> bytes:
            roots = self.roots if access.is_local(filesystem) else None
            return read_file(filesystem, path, access.shown(uri), max_bytes, self._retries, roots)

        return self.first_existing(uri, read)

    def first_existing(self, uri: str, read: Callable[[Any, str], Result]) -> Result:
        """Return `read(filesystem, path)` of the first spelling of a URI (`spellings`) that exists; if none does, or
        another one is not allowed, raise the RowError of the URI as it is written."""
        missing: RowError | None = None
        for spelling in spellings(uri):
            try:
                return read(*self.locate(spelling))
            except RowError as error:
                if missing is not None and error.code != "missing_image" and error.code != "uri_refused":
                    raise
                missing = missing or error
                if missing.code != "missing_image":
                    break
        assert missing is not None
        raise missing

    def check(self, uri: str) -> str:
        """Return the scheme of a URI (empty for a path); RowError `uri_refused` if the URI is not allowed."""
        scheme = scheme_of(uri)
        if "\0" in uri or ("::" in uri and scheme != "data"):
            raise _refused(uri, "it is no plain path or URL")
        if scheme and scheme not in self.source.uri_schemes:
            raise _refused(uri, f"{scheme!r} is not in source.uri_schemes")
        return scheme

    @property
    def media_root(self) -> str:
        """The folder of paths in rows, as a URL."""
        given = self.source.media_root
        if given is None or access.uri_scheme(given) or given.startswith("/"):
            return given or self.root
        scheme, separator, path = self.root.rpartition("://")
        return scheme + separator + posixpath.normpath(access.join(path, given))

    @property
    def roots(self) -> tuple[str, ...]:
        """The resolved local folders below which URIs may name files."""
        opened = (access.open_url(self.root, "source.path"), access.open_url(self.media_root, "source.media_root"))
        source_roots = tuple(root for filesystem, root in opened if access.is_local(filesystem))
        folders = (*source_roots, *self.source.local_roots)
        return tuple(os.path.realpath(folder) for folder in (*folders, *snapshot_blobs(source_roots)))

    @property
    def _retries(self) -> RetryPolicy:
        return RetryPolicy(self.source.fetch.max_attempts, FIRST_WAIT_S)

    def locate(self, uri: str) -> tuple[Any, str]:
        """Return the file system and path of a URI that is neither a `data:` nor an HTTP URI; RowError `uri_refused`
        for a path that leaves the root, `unreadable_image` if there is no driver."""
        if scheme_of(uri):
            try:
                return access.open_url(uri, "source.uri_schemes")
            except ConfigError as error:
                raise RowError("unreadable_image", str(error)) from None
            except Exception as error:
                message = f"{access.shown(uri)!r} cannot be opened: {access.reason_of(error)}"
                raise RowError("unreadable_image", message) from None
        filesystem, root = access.open_url(self.media_root, "source.media_root")
        if uri.startswith("/"):
            if "file" in self.source.uri_schemes and access.is_local(filesystem):
                return filesystem, uri
            raise _refused(uri, "it is absolute; paths are relative to the source root")
        is_store = not access.is_local(filesystem) and scheme_of(self.media_root) not in ("http", "https")
        is_plain = is_store and not {".", ".."} & set(uri.split("/"))
        relative = uri if is_plain else posixpath.normpath(uri)  # a key of a store may contain `//`
        # Below an HTTP root, the path is part of a URL, in which percent-encoded dots also lead to parent folders.
        is_web = scheme_of(self.media_root) in ("http", "https")
        for candidate in (relative, posixpath.normpath(unquote(relative)) if is_web else relative):
            if candidate == ".." or candidate.startswith(("../", "/")):
                where = "the source root" if self.source.media_root is None else "source.media_root"
                raise _refused(uri, f"it leaves {where}")
        return filesystem, access.join(root, relative)

    def _fetch_web(self, uri: str, max_bytes: int) -> bytes:
        fetch = self.source.fetch
        limits = web.FetchLimits(self.source.uri_schemes, fetch.private_hosts, max_bytes, fetch.timeout_s)
        try:
            return retried(lambda: web.fetch(uri, limits), self._retries)
        except web.Refused as refusal:
            raise _refused(uri, str(refusal)) from None
        except web.TooLarge:
            raise RowError("image_too_large", f"{access.shown(uri)} has more than {max_bytes} bytes") from None
        except Exception as error:
            missing = isinstance(error, web.StatusError) and error.status in (404, 410)
            code = "missing_image" if missing else "unreadable_image"
            raise RowError(code, f"{access.shown(uri)} cannot be read: {access.reason_of(error)}") from None


def read_file(
    filesystem: Any,
    path: str,
    name: str,
    max_bytes: int,
    retries: RetryPolicy | None = None,
    roots: Sequence[str] | None = None,
) -> bytes:
    """Read one image file; RowError `missing_image`, `unreadable_image`, `uri_refused` or `image_too_large`."""
    with row_errors(name):
        data = access.read_bounded(filesystem, path, max_bytes, retries, roots)
    if data is None:
        raise RowError("image_too_large", f"{name} has more than {max_bytes} bytes")
    return data


@contextmanager
def row_errors(name: str) -> Iterator[None]:
    """Convert any failure to read a file to a RowError."""
    try:
        yield
    except RowError:
        raise
    except FileNotFoundError:
        raise RowError("missing_image", f"{name} does not exist") from None
    except OutsideRoots as refusal:
        raise RowError("uri_refused", f"{name!r}: {access.reason_of(refusal)}") from None
    except Exception as error:  # drivers raise errors of no common class
        raise RowError("unreadable_image", f"{name} cannot be read: {access.reason_of(error)}") from None


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI, including `data`; empty for a path."""
    return "data" if uri[:64].lstrip()[:5].lower() == "data:" else access.uri_scheme(uri[:64])


def spellings(uri: str) -> Iterator[str]:
    """Yield a URI as it is written, and then the ways in which other systems spell the same name: without white space
    around it, percent-decoded, with `/` for the separator of Windows, and in Unicode's forms NFC and NFD. All have the
    scheme of the URI, which was checked: `http%3A//host` is a path, and no spelling of a path is a URL."""
    texts = [uri]
    for change in (str.strip, unquote, lambda text: text.replace("\\", "/")):
        texts += [changed for text in texts if (changed := change(text)) not in texts]
    forms = (unicodedata.normalize(form, text) for text in texts for form in ("NFC", "NFD"))
    named = (text for text in (*texts, *forms) if text and "\0" not in text and "::" not in text)
    scheme = scheme_of(uri)
    yield from dict.fromkeys(text for text in named if scheme_of(text) == scheme)


def _refused(uri: str, why: str) -> RowError:
    return RowError("uri_refused", f"{access.shown(uri)!r}: {why}")
