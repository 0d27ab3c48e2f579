"""Opens fsspec URLs and reads files with size limits and retries; messages never contain credentials."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from configs.load import ConfigError
from files.local import open_regular
from pipeline.storage.failures import explain
from pipeline.storage.retries import CutShort, RetryPolicy, retried

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*)://")
_URLS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s'\"<>|)\]}]+")
_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|(^|_)KEY|KEY$|AUTH|SAS|CONNECTION_STRING", re.IGNORECASE)
_MIN_SECRET_CHARS = 8
_S3_OPTIONS: dict[str, Any] = {
    # Stalled connections are closed and retried; cached listings could be outdated.
    "config_kwargs": {"connect_timeout": 20, "read_timeout": 60},
    "use_listings_cache": False,
}
_OPTIONS = {"s3": _S3_OPTIONS}
_ALIASES = {"s3a": "s3", "s3n": "s3"}
"""Schemes that Spark and Hadoop use for a store of another name."""
_FILE_URL = re.compile(r"^file:(?://(?:localhost)?)?(?=/(?!/))", re.IGNORECASE)
BLOCK_BYTES = 8 * 1024 * 1024
"""Block size of reads from a remote file, in bytes."""
MAX_URL_CHARS = 200
MAX_REASON_CHARS = 300


def open_url(url: str, dotted_path: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; the driver reads credentials from the environment.
    ConfigError with `dotted_path` if no driver for the scheme is installed, the URL is malformed, or the driver refuses
    the credentials."""
    try:
        filesystem, path = url_to_fs(canonical(url), **_OPTIONS.get(uri_scheme(url), {}))
    except Exception as error:  # drivers raise errors of no common class
        raise refusal(dotted_path, url, error) from None
    return filesystem, str(path)


def refusal(dotted_path: str, url: str, error: BaseException) -> ConfigError:
    """Return the ConfigError of a store that cannot be used, with the dotted path of the field that names it."""
    return ConfigError(f"{dotted_path}: {shown(url)} cannot be opened: {reason_of(error, url)}")


@contextlib.contextmanager
def refusals(dotted_path: str, url: str) -> Iterator[None]:
    """Convert errors of the store at `url`, and of the operating system, to `refusal` inside the block."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or explain(error, url):
            raise refusal(dotted_path, url, error) from None
        raise


def is_local(filesystem: Any) -> bool:
    return isinstance(filesystem, LocalFileSystem)


def unstripped(filesystem: Any, path: str) -> str:
    """Return the URL by which another process can open the same path; a local path is unchanged."""
    return path if is_local(filesystem) else str(filesystem.unstrip_protocol(path))


def shown(url: str) -> str:
    """Format a URL or path for messages: without user, password, query and fragment, at most `MAX_URL_CHARS` long."""
    match = _SCHEME.match(url)
    if match:
        authority, slash, path = re.split(r"[?#]", url, maxsplit=1)[0][match.end() :].partition("/")
        url = match.group() + authority.rpartition("@")[2] + slash + path
    elif url[:5].lower() == "data:":
        url = url.partition(",")[0]
    return cut(url, MAX_URL_CHARS)


def cut(text: str, max_chars: int) -> str:
    """Shorten a text to at most `max_chars` characters; shortened text ends in dots."""
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def printable(text: str) -> str:
    """Escape characters that a terminal does not show, such as line feeds and surrogates in names of files."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def is_secret_name(name: str) -> bool:
    """Return whether the name of an environment variable marks its value as a secret."""
    return _SECRET_NAMES.search(name) is not None


def reason_of(error: BaseException, url: str = "") -> str:
    """Return an error's message in one line, without credentials of URLs and values of secret environment variables.

    For an error of a store, it is `failures.explain`; `url` is the store's.
    """
    reason = explain(error, url) or (error.strerror if isinstance(error, OSError) and error.strerror else error)
    text = _URLS.sub(lambda match: shown(match.group()), str(reason))
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_CHARS and is_secret_name(name):
            text = text.replace(value, "***")
    return cut(" ".join(text.split()) or type(error).__name__, MAX_REASON_CHARS)


def canonical(url: str) -> str:
    """Return a URL with its scheme in lower case, `s3a` and `s3n` as `s3`, and `file:/x` and `file://localhost/x` as
    `file:///x`; white space before a scheme is removed, and a path is unchanged."""
    stripped = url.lstrip()
    if _FILE_URL.match(stripped):
        return _FILE_URL.sub("file://", stripped)
    match = _SCHEME.match(stripped)
    return f"{uri_scheme(stripped)}://{stripped[match.end() :]}" if match else url


def uri_scheme(uri: str) -> str:
    """Return the scheme of a URL in lower case, an alias as the store's own scheme; empty for a path."""
    match = _SCHEME.match(uri.lstrip())
    if match is None:
        return "file" if _FILE_URL.match(uri.lstrip()) else ""
    scheme = match.group(1).lower()
    return _ALIASES.get(scheme, scheme)


def join(root: str, relative: str) -> str:
    """Join a root and a relative path without normalising the relative path."""
    return f"{root.rstrip('/')}/{relative}" if root else relative


class RemoteFile(io.RawIOBase):
    """A remote file that is reopened at its position if a read fails transiently or returns too few bytes."""

    def __init__(self, filesystem: Any, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path
        self._position = 0
        self._file: Any = None
        self.size: int | None = None
        retried(self._open)

    def _open(self) -> None:
        if self._file is None:
            self._file = self._filesystem.open(self._path, "rb", block_size=BLOCK_BYTES)
            size = getattr(self._file, "size", None)
            self.size = self.size if size is None else int(size)

    def _drop(self) -> None:
        file, self._file = self._file, None
        with contextlib.suppress(Exception):  # the read has failed already
            if file is not None:
                file.close()

    def read(self, num_bytes: int | None = -1) -> bytes:
        """Read `num_bytes` (all remaining bytes if negative); returns fewer only at the end of the file."""
        max_bytes = -1 if num_bytes is None else num_bytes

        def once() -> bytes:
            try:
                self._open()
                self._file.seek(self._position)  # drivers may share one file among its readers
                data: bytes = self._file.read(max_bytes)
                if self.size is not None:
                    num_left = max(0, self.size - self._position)
                    if len(data) < (num_left if max_bytes < 0 else min(max_bytes, num_left)):
                        raise CutShort(f"received {len(data)} bytes although {num_left} are left")
            except Exception:
                self._drop()
                raise
            return data

        data = retried(once)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._position
        elif whence == os.SEEK_END:
            if self.size is None:
                raise OSError(errno.ESPIPE, "the store does not report the file's size")
            offset += self.size
        self._position = max(0, offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    seekable = readable

    def close(self) -> None:
        self._drop()
        super().close()


def open_file(filesystem: Any, path: str) -> Any:
    """Open a file for reading, as a context manager: `open_regular` for local files, `RemoteFile` for others."""
    return open_regular(path) if is_local(filesystem) else RemoteFile(filesystem, path)


def read_bounded(
    filesystem: Any, path: str, max_bytes: int, policy: RetryPolicy | None = None, roots: Sequence[str] | None = None
) -> bytes | None:
    """Read a whole file; None if it has more than `max_bytes`. `roots` restricts local files as in `open_regular`."""

    def once() -> bytes | None:
        with open_regular(path, roots) if is_local(filesystem) else filesystem.open(path, "rb") as file:
            if is_local(filesystem) and os.fstat(file.fileno()).st_size > max_bytes:
                return None
            size = os.fstat(file.fileno()).st_size if is_local(filesystem) else getattr(file, "size", None)
            # A read allocates what it is asked for.
            data: bytes = file.read((max_bytes if size is None else min(max_bytes, size)) + 1)
            if isinstance(size, int) and len(data) < min(size, max_bytes + 1):
                raise CutShort(f"received {len(data)} of {size} bytes")
        return data

    data = once() if is_local(filesystem) else retried(once, policy)
    return data if data is not None and len(data) <= max_bytes else None


def size_of(file: Any) -> int:
    """Return the size of an open file in bytes; seeks to its end if the driver does not report a size."""
    size = getattr(file, "size", None)
    if size is None:
        position = file.tell()
        size = file.seek(0, os.SEEK_END)
        file.seek(position)
    return int(size)
