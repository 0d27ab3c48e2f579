"""Headers of tars: honest ones as `tarfile` reads them, and false ones that cost neither time nor other rows."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.source import SourceConfig
from pipeline.formats import tar_headers, tars
from pipeline.formats.tar_archive import Archive
from tests.pipeline.formats.false_headers import END, header, member, number, padded, pax, record, sparse
from tests.pipeline.formats.shards import images_of, outcomes, read_all

FORMS = ("old", "0.0", "0.1", "1.0")
TERABYTE = 2**40


def members_of(data: bytes) -> list[tuple]:
    """Every member with its content as this package reads it."""
    archive = Archive(io.BytesIO(data), 10**9)
    entries = []
    for entry in archive:
        content = archive.content(entry) if entry.is_file else b""
        entries.append((entry.name, entry.type, entry.size, entry.offset, entry.end, entry.mtime, content))
    return entries


def members_of_tarfile(data: bytes) -> list[tuple]:
    entries = []
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        while (info := tar.next()) is not None:
            content = tar.extractfile(info).read() if info.isreg() else b""  # type: ignore[union-attr]
            entries.append((info.name, info.type, info.size, info.offset, tar.offset, int(info.mtime), content))
    return entries


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=300).map(
    lambda name: name.strip("/") or "x"
)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
FILES = st.lists(st.tuples(NAMES, KINDS, st.binary(max_size=1100), st.integers(0, 2**32)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=100)
@given(FILES, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.booleans())
def test_members_are_those_of_tarfile(files, form, has_global) -> None:
    buffer = io.BytesIO()
    options: dict[str, Any] = {"pax_headers": {"comment": "for all"}} if has_global else {}
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as tar:
        for name, kind, data, mtime in files:
            info = tarfile.TarInfo(name if form != tarfile.USTAR_FORMAT else name.encode()[:90].decode(errors="ignore"))
            info.type, info.linkname, info.mtime = kind, "there", mtime
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(data))
    data = buffer.getvalue()
    assert members_of(data) == members_of_tarfile(data)


MAPS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=90)


@settings(deadline=None, max_examples=60)
@given(MAPS, st.integers(0, 30), st.sampled_from(FORMS))
def test_sparse_members_are_expanded_as_tarfile_expands_them(gaps, rest, form) -> None:
    pairs, content = [], b""
    for gap, size in gaps:
        pairs.append((len(content) + gap, size))
        content += bytes(gap) + b"d" * size
    content += bytes(rest)
    data = sparse(form, "s.txt", len(content), pairs, b"d" * sum(size for _, size in pairs)) + member("z", b"z") + END
    assert [entry[-1] for entry in members_of(data)] == [content, b"z"]
    if form != "old" and pairs and pairs[0][0]:  # tarfile drops segments at offset 0 of continued old maps
        assert [entry[-1] for entry in members_of_tarfile(data)] == [content, b"z"]


class Counted(io.BytesIO):
    """A file that counts the bytes that are read from it."""

    num_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_bytes += len(data)
        return data


def source_of(data: bytes, **options: Any) -> SourceConfig:
    fsspec.filesystem("memory").pipe_file("/headers/x.tar", data)
    return SourceConfig(kind="webdataset", path="memory://headers/x.tar", **options)


def honest(first: int, stop: int) -> bytes:
    return b"".join(member(f"{n:03}.jpg", b"%d" % n) + member(f"{n:03}.txt", b"t%d" % n) for n in range(first, stop))


SPARSE_LIES: dict[str, Callable[[str, str], bytes]] = {
    "a terabyte": lambda form, name: sparse(form, name, TERABYTE, [(0, 9)], b"d" * 9),
    "200 times its bytes": lambda form, name: sparse(form, name, 4_000_000, [(0, 9)], b"d" * 9),
    "segments behind its end": lambda form, name: sparse(form, name, 100, [(200, 9)], b"d" * 9),
    "more data than it has": lambda form, name: sparse(form, name, 9000, [(0, 9000)], b"d" * 9),
    "segments that overlap": lambda form, name: sparse(form, name, 100, [(0, 9), (5, 9)], b"d" * 18),
    "segments that go back": lambda form, name: sparse(form, name, 100, [(50, 9), (0, 9)], b"d" * 18),
}


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=25)
@given(lie=st.sampled_from(sorted(SPARSE_LIES)), num_before=st.integers(0, 3), num_after=st.integers(0, 3))
def test_members_around_a_false_sparse_header_give_all_rows(form, lie, num_before, num_after) -> None:
    num_honest = num_before + num_after
    lying = SPARSE_LIES[lie](form, "lie.jpg")
    data = honest(0, num_before) + lying * 1 + honest(num_before, num_honest) + END
    table = read_all(source_of(data), "{txt}" if num_before else "x")
    codes = list(outcomes(table).values())
    assert codes[num_before] in ("broken_sample", "image_too_large")
    assert codes[:num_before] + codes[num_before + 1 :] == [""] * num_honest
    images = images_of(table)
    assert images[:num_before] + images[num_before + 1 :] == [[b"%d" % n] for n in range(num_honest)]


def test_many_sparse_members_of_a_small_archive_cost_no_row_of_the_others() -> None:
    lying = b"".join(sparse("old", f"s{n:03}.jpg", 60 * 2**20, [(0, 1024)], bytes(1024)) for n in range(400))
    codes = list(outcomes(read_all(source_of(honest(0, 5) + lying + honest(5, 10) + END))).values())
    assert codes == [""] * 5 + ["broken_sample"] * 400 + [""] * 5


SIZE_LIES: dict[str, bytes] = {
    "base 256": header("lie.jpg", number(TERABYTE)),
    "base 256, a member that is skipped": header("lie.bin", number(2**80)),
    "pax": pax({"size": b"%d" % TERABYTE}) + header("lie.jpg", 9),
    "pax, a member that is skipped": pax({"size": b"%d" % 2**60}) + header("lie.bin", 9),
    "octal": header("lie.jpg", 8**11 - 1),
    "one block more than there is": header("lie.jpg", 512 * 5),
    "negative in base 256": header("lie.jpg", number(-512)),
    "negative in pax": pax({"size": b"-512"}) + header("lie.jpg", 9),
    "no number in pax": pax({"size": b"1e9"}) + header("lie.jpg", 9),
    "a sparse member's stored size": header("lie.jpg", number(TERABYTE), b"S", at_483=number(9)),
    "an unknown type": header("lie.jpg", number(TERABYTE), b"Q"),
    "digits of a pax record": pax(b"9" * 500_000),
    "many digits of sparse sizes": pax(record("comment", b"1" * 500_000) + record("GNU.sparse.size", b"5"))
    + b"?" * 512,
    "a pax record that is longer than its header": pax(b"99 path=a\n") + header("lie.jpg", 9),
    "a chain of pax headers": pax({"comment": b"x"}) * 2100 + header("lie.jpg", 9),
    "a chain of long names": (header("././@LongLink", 9, b"L") + padded(b"n" * 9)) * 2100 + header("lie.jpg", 9),
    "a long name of a terabyte": header("././@LongLink", number(TERABYTE), b"L"),
    "a pax header of 2 MB": pax({"comment": b"x" * 2_000_000}) + header("lie.jpg", 9),
    "a size for all members": pax({"size": b"9"}, b"g") + header("lie.jpg", 9),
    "an endless sparse map": header("lie.jpg", 9, b"S", at_482=b"\1", at_483=number(9))
    + (bytes(504) + b"\1" * 8) * 2100,
}


@pytest.mark.parametrize("lie", SIZE_LIES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_header_with_a_false_size_ends_the_archive_without_further_reads(lie, pack) -> None:
    data = pack(honest(0, 3) + SIZE_LIES[lie] + padded(b"d" * 9) + END)
    codes = list(outcomes(read_all(source_of(data), "{txt}")).values())
    # Before a damaged header, the last sample may lack members.
    assert codes in ([""] * 3 + ["broken_shard"], [""] * 2 + ["broken_shard"])
    file = Counted(data)
    with pytest.raises((tarfile.ReadError, EOFError)):
        list(tars.read_runs(file, tars.Selection(with_text=True)))
    assert file.num_bytes <= len(data) + 4096


def test_a_member_that_ends_with_the_archive_is_read() -> None:
    data = header("a.jpg", 512 * 3) + b"d" * 512 * 3
    [entry] = Archive(io.BytesIO(data + END), 10**9)
    assert entry.end == len(data)
    with pytest.raises(tarfile.ReadError, match="beyond the end of the archive"):
        list(Archive(io.BytesIO(data[:-512]), 10**9))


def test_headers_of_a_member_are_accepted_up_to_their_bound() -> None:
    size = tar_headers.MAX_HEADER_BYTES - tar_headers.BLOCK
    text = record("comment", b"x" * (size - len(record("comment", b"x" * (size - 30))) + size - 30))
    assert len(text) == size
    assert [entry[0] for entry in members_of(pax(text) + member("a.jpg", b"a") + END)] == ["a.jpg"]
    with pytest.raises(tarfile.ReadError, match="more than 1048576 bytes"):
        members_of(pax(text[:-1] + b"x\n") + member("a.jpg", b"a") + END)


def test_a_compressed_archive_of_many_members_takes_bounded_memory() -> None:
    data = gzip.compress(b"".join(header(f"{n:06}.jpg") for n in range(3000)) + END)
    selection = tars.Selection(with_text=False, max_image_bytes=9, max_bytes=1000 * tars.RUN_BYTES)
    runs = tars.read_runs(io.BytesIO(data), selection)
    assert len([next(runs) for _ in range(1000)]) == 1000
    with pytest.raises(ValueError, match="takes more than 512000 bytes"):
        next(runs)
