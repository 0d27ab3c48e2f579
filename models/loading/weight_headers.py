"""Read the headers of safetensors files and count what is stored, by arithmetic and without the safetensors library.

A header names a tensor in about 70 bytes, so its length alone does not bound the memory of a model; the counts do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from files.local import open_regular
from files.strict_json import JsonError, parse_object

MAX_HEADER_BYTES = 100 * 1000**2
"""Maximum size of a header; the safetensors library uses the same limit."""
MAX_HEADER_EXCESS_BYTES = 4 * 1024**2
"""A header may be larger than the weights behind it by this size, as in tiny models."""
MAX_TENSORS = 400_000
"""Maximum number of tensors of a checkpoint; the largest published mixtures of experts have about 150,000."""
VALUES_PER_TENSOR = 16
PICKLED_SUFFIXES = (".bin", ".pt", ".pth")
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
"""Bits per element of a dtype in a header."""


class HeaderError(ValueError):
    """Raised for a file that is no safetensors file; the message is a part of a sentence."""


class HeaderTooLarge(HeaderError):
    """Raised for a header that names more tensors than the weights of a model have."""


class StoredTensor(NamedTuple):
    """A tensor of a header: its shape, and the bytes of its values."""

    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Stored:
    """What the weight files of a checkpoint hold; elements of pickled files are their bytes."""

    num_tensors: int
    num_elements: int
    num_bytes: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file, by name. Raises HeaderError if the header and the size disagree, and
    OSError if the file cannot be read."""
    with open_regular(file) as stream:
        num_bytes = stream.seek(0, 2)
        stream.seek(0)
        head = stream.read(8)
        return parse_header(head + stream.read(header_bytes(head, num_bytes)), num_bytes)


def header_bytes(head: bytes, file_bytes: int) -> int:
    """Return the length of the header that follows the first 8 bytes of a file with `file_bytes` bytes; HeaderError if
    it is too long for the file or for the weights behind it."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or 8 + length > file_bytes:
        raise HeaderError("it ends before its header does")
    if length > MAX_HEADER_BYTES:
        raise HeaderTooLarge(f"its header has {length:,} bytes, and at most {MAX_HEADER_BYTES:,} are read")
    if length > file_bytes - 8 - length + MAX_HEADER_EXCESS_BYTES:
        raise HeaderTooLarge(f"its header has {length:,} bytes for {file_bytes - 8 - length:,} bytes of weights")
    return length


def parse_header(head: bytes, file_bytes: int) -> dict[str, StoredTensor]:
    """Parse the first bytes of a safetensors file, header included, to tensors by name; raises HeaderError."""
    length = header_bytes(head, file_bytes)
    data = head[8 : 8 + length]
    if data.count(b'"data_offsets"') > MAX_TENSORS:
        raise HeaderTooLarge(f"its header names more than {MAX_TENSORS:,} tensors")
    try:
        header = parse_object(data, MAX_TENSORS * VALUES_PER_TENSOR)
    except JsonError as error:
        raise HeaderError(f"in its header, {error}") from None
    header.pop("__metadata__", None)
    spans = sorted((*_span(name, entry), name) for name, entry in header.items())
    end = 0
    for start, stop, name in spans:
        if start != end:
            raise HeaderError(f"the values of {name[:100]!r} do not begin where the previous ones end")
        end = stop
    if 8 + length + end != file_bytes:
        raise HeaderError(f"its header asks for {8 + length + end:,} bytes, and it has {file_bytes:,}")
    return {name: StoredTensor(tuple(header[name]["shape"]), stop - start) for start, stop, name in spans}


def _problem(error: HeaderError) -> str:
    return " is not read" if isinstance(error, HeaderTooLarge) else " is torn or not safetensors"


def _span(name: str, entry: Any) -> tuple[int, int]:
    """Return where the values of a tensor begin and end; HeaderError unless dtype and shape agree with it."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise HeaderError(f"{name[:100]!r} has no dtype, shape and offsets")
    if any(type(size) is not int or size < 0 for size in shape):
        raise HeaderError(f"{name[:100]!r} has a shape that is no list of sizes")
    bits = math.prod(shape) * BITS.get(dtype, 0)
    if not 0 <= start <= stop or (dtype in BITS and bits != 8 * (stop - start)):
        raise HeaderError(f"{name[:100]!r} has {stop - start:,} bytes, which is not the size of its shape")
    return start, stop


def stored_of(tensors: Iterable[Mapping[str, StoredTensor]]) -> Stored:
    """Count the tensors of several headers; HeaderError if there are more than `MAX_TENSORS`."""
    stored = [tensor for header in tensors for tensor in header.values()]
    if len(stored) > MAX_TENSORS:
        raise HeaderTooLarge(f"its headers name {len(stored):,} tensors, and at most {MAX_TENSORS:,} are read")
    elements, num_bytes = (sum(sizes) for sizes in ([t.num_elements for t in stored], [t.num_bytes for t in stored]))
    return Stored(len(stored), elements, num_bytes)


def stored_weights(folder: Path) -> Stored | None:
    """Count what the weight files of a folder hold; None without weight files. Raises HeaderError with the file's name.

    Of pickled files only sizes are known: each byte counts as an element, and each 64 bytes as a tensor.
    """
    headers = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            headers.append(read_header(file))
        except OSError as error:
            raise HeaderError(f"{file.name} cannot be read: {error.strerror or error}") from None
        except HeaderError as error:
            raise HeaderError(f"{file.name}{_problem(error)} ({error})") from None
    if headers:
        return stored_of(headers)
    pickled = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in PICKLED_SUFFIXES)
    return Stored(pickled // 64, pickled, pickled) if pickled else None
