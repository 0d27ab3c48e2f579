from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import kind, tar_archive, tars
from pipeline.manifest import datasource, freezing
from pipeline.prompts.row_options import PromptOptions
from tests.pipeline.formats.shards import images_of, outcomes, read_all, tar_bytes

Members = list[tuple[str, bytes]]


def tar_source(path: Path | str, **options) -> SourceConfig:
    return SourceConfig(kind="webdataset", path=str(path), **options)


def write(path: Path, members: Members, mode: str = "w") -> Path:
    path.write_bytes(tar_bytes(members, mode))
    return path


def samples(count: int) -> Members:
    members: Members = []
    for number in range(count):
        members.append((f"{number:03d}.jpg", f"image {number}".encode()))
        members.append((f"{number:03d}.json", json.dumps({"n": number}).encode()))
    return members


def test_members_of_one_basename_are_one_sample(tmp_path) -> None:
    write(
        tmp_path / "a.tar",
        [
            ("d/1.jpg", b"one"),
            ("d/1.json", b'{"caption": "c1", "n": [1]}'),
            ("d/1.txt", b"t1"),
            ("e/1.png", b"other"),
            ("e/1.title.txt", "\ufefftitle é".encode()),
        ],
    )
    table = read_all(tar_source(tmp_path), "{caption}{n}{txt}{title}{__key__}", keep=("n", "title", "__key__"))
    assert outcomes(table) == {"a.tar#0": "", "a.tar#1": ""}
    assert images_of(table) == [[b"one"], [b"other"]]
    assert [json.loads(fields) for fields in table["fields"].to_pylist()] == [
        {"caption": "c1", "n": [1], "txt": "t1", "title": None, "__key__": "d/1"},
        {"caption": None, "n": None, "txt": None, "title": "title é", "__key__": "e/1"},
    ]
    assert table["n"].to_pylist() == ["[1]", None]
    assert table["title"].to_pylist() == [None, "title é"]
    assert table["__key__"].to_pylist() == ["d/1", "e/1"]


def test_several_images_come_in_the_order_of_their_extensions(tmp_path) -> None:
    write(tmp_path / "a.tar", [("1.b.png", b"B"), ("1.a.jpg", b"A"), ("1.PNG", b"P"), ("1.npy", b"skipped")])
    assert images_of(read_all(tar_source(tmp_path, companions="show"))) == [[b"A", b"B", b"P"]]


@pytest.mark.parametrize(
    ("extensions", "options", "expected"),
    [
        ([f"{number}.png" for number in (1, 10, 11, 2, 3)], {}, ["1.png", "2.png", "3.png", "10.png", "11.png"]),
        (["jpg", "seg.png", "depth.png"], {}, ["jpg"]),
        (["jpg", "seg.png"], {"companions": "show"}, ["jpg", "seg.png"]),
        (["jpg", "2.jpg", "png"], {}, ["2.jpg", "jpg", "png"]),
        (["left.jpg", "right.jpg"], {}, ["left.jpg", "right.jpg"]),
        (["jpg", "png", "seg.png"], {"columns": SourceColumnsConfig(image="png;seg.png")}, ["png", "seg.png"]),
        (["img"], {}, ["img"]),
    ],
)
def test_the_images_of_a_sample_are_its_pictures_in_natural_order(tmp_path, extensions, options, expected) -> None:
    write(tmp_path / "a.tar", [(f"1.{extension}", extension.encode()) for extension in extensions])
    assert images_of(read_all(tar_source(tmp_path, **options))) == [[name.encode() for name in expected]]


def test_a_member_that_no_sample_has_is_refused_by_name(tmp_path) -> None:
    write(tmp_path / "a.tar", [("1.jpg", b"J"), ("1.cap", b"caption")])
    assert read_all(tar_source(tmp_path), "{cap}")["fields"].to_pylist() == ['{"cap": "caption"}']
    with pytest.raises(ConfigError, match=r"^source\.columns\.image: no member 'png' .*; extensions there: cap, jpg$"):
        read_all(tar_source(tmp_path, columns=SourceColumnsConfig(image="png")))


PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.compress(data, "zstd", asbytes=True)),
}


def linked(data: bytes, *links: tuple[str, str]) -> bytes:
    """The members of an archive, and hard links to them."""
    for name, target in links:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.LNKTYPE, target
        data += info.tobuf()
    return data + bytes(1024)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("packed", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_a_hard_link_is_the_member_that_it_names(tmp_path, kind, packed) -> None:
    buffer = io.BytesIO()
    long = f"{'d' * 60}/{'e' * 30}/1.png"
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, link, data in [
            (long, "", b"one"),
            ("2.png", long, b""),
            ("3.png", "", b"three"),
            ("4.png", "3.png", b""),
        ]:
            info = tarfile.TarInfo(name)
            info.size, info.linkname, info.type = len(data), link, tarfile.LNKTYPE if link else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(data))
        gone = tarfile.TarInfo("5.png")
        gone.type, gone.linkname = tarfile.LNKTYPE, "6.png"
        tar.addfile(gone)
    data = buffer.getvalue()
    (tmp_path / f"a.tar{packed}").write_bytes(PACKED[packed](data))
    for span_bytes in (1 << 20, 1):
        table = read_all(tar_source(tmp_path, span_max_bytes=span_bytes))
        assert list(outcomes(table).values()) == ["", "", "", "", "broken_sample"]
        assert images_of(table) == [[b"one"], [b"one"], [b"three"], [b"three"], []]


def test_hard_links_of_a_compressed_archive_need_a_bounded_copy(tmp_path, monkeypatch) -> None:
    members = [(f"{number}.png", number.to_bytes(1, "big") * 3000) for number in range(9)]
    data = linked(tar_bytes(members)[: 9 * 3584], ("a.png", "0.png"), ("b.png", "8.png"))
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data))
    monkeypatch.setattr(tar_archive, "MAX_COPIED_BYTES", len(data))
    table = read_all(tar_source(tmp_path / "a.tar.gz"))
    assert images_of(table)[-2:] == [[members[0][1]], [members[8][1]]]
    monkeypatch.setattr(tar_archive, "MAX_COPIED_BYTES", len(data) - 1)
    table = read_all(tar_source(tmp_path / "a.tar.gz"))
    assert list(outcomes(table).values()) == [*[""] * 9, "broken_sample", "broken_sample"]
    assert images_of(table)[:9] == [[content] for _, content in members]


def test_a_damaged_compressed_archive_with_hard_links_yields_its_rows_up_to_the_damage(tmp_path) -> None:
    first = linked(tar_bytes([("0.png", b"zero")])[:1024], ("1.png", "0.png"))[:1536]
    data = first + tar_bytes([(f"{number}.png", bytes([number]) * 2000) for number in range(2, 9)])
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(data, 0)[:-9000])
    table = read_all(tar_source(tmp_path))
    codes = list(outcomes(table).values())
    assert images_of(table)[:3] == [[b"zero"], [b"zero"], [b"\2" * 2000]]
    assert codes[-1] == "broken_shard"
    assert set(codes[:-1]) == {""}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tgz", "a.tar.bz2", "a.tar.xz", "a.tar.zst", "a.tzst"])
def test_compressed_archives_are_streamed_alike(tmp_path, name) -> None:
    packed = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    pack = packed.get(name[-2:], packed.get(name[-3:], lambda data: data))
    data = tar_bytes(samples(3))
    (tmp_path / name).write_bytes(pa.compress(data, "zstd", asbytes=True) if "zst" in name else pack(data))
    table = read_all(tar_source(tmp_path))
    assert outcomes(table) == {f"{name}#{number}": "" for number in range(3)}
    assert images_of(table) == [[f"image {number}".encode()] for number in range(3)]


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: pa.compress(data, "zstd", asbytes=True)])
def test_an_archive_that_expands_beyond_measure_is_cut_off(tmp_path, monkeypatch, pack) -> None:
    monkeypatch.setattr(tars, "MIN_EXPANDED_BYTES", 10_000)
    members = [("a.jpg", b"a"), *((f"{number}.jpg", bytes(1_000_000)) for number in range(5)), ("z.jpg", b"z")]
    (tmp_path / "x.tar").write_bytes(pack(tar_bytes(members)))
    table = read_all(tar_source(tmp_path))
    codes = list(outcomes(table).values())
    assert codes == [""] * (len(codes) - 1) + ["broken_shard"]
    assert len(codes) < 7
    assert "expands to more than 200 times its size" in table["error_message"].to_pylist()[-1]


def test_a_span_of_an_archive_that_was_packed_does_not_fill_the_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(kind, "MIN_SPAN_BYTES", 1000)
    data = tar_bytes([(f"{number}.jpg", os.urandom(100) * 30) for number in range(9)])
    (tmp_path / "x.tar").write_bytes(gzip.compress(data))
    table = read_all(tar_source(tmp_path, span_max_bytes=1))
    assert list(outcomes(table).values()) == ["", "", "broken_shard"]
    assert "takes more than 8000 bytes" in table["error_message"].to_pylist()[-1]


def test_a_field_can_be_the_id(tmp_path) -> None:
    write(tmp_path / "a.tar", [*samples(2), ("x.jpg", b"x"), ("y.jpg", b"y"), ("y.json", b'{"n": 1}')])
    codes = outcomes(read_all(tar_source(tmp_path, id_column="n")))
    assert codes == {"0": "", "1": "", "a.tar#2": "missing_id", "a.tar#3": "duplicate_id"}
    assert list(outcomes(read_all(tar_source(tmp_path, id_column="__key__")))) == ["000", "001", "x", "y"]


def test_a_sample_split_by_others_is_one_error_row_at_its_first_place(tmp_path) -> None:
    members = [("a.jpg", b"a"), ("b.jpg", b"b"), ("a.txt", b"late"), ("c.jpg", b"c"), ("a.png", b"later")]
    write(tmp_path / "x.tar", members)
    table = read_all(tar_source(tmp_path))
    assert outcomes(table) == {"x.tar#0": "broken_sample", "x.tar#1": "", "x.tar#2": ""}
    assert images_of(table) == [[], [b"b"], [b"c"]]


def test_member_names_with_paths_are_not_used_as_paths(tmp_path) -> None:
    write(tmp_path / "x.tar", [("../../etc/passwd.jpg", b"a"), ("/abs/b.jpg", b"b"), ("c:\\d.jpg", b"c")])
    table = read_all(tar_source(tmp_path), keep=("__key__",))
    assert table["__key__"].to_pylist() == ["../../etc/passwd", "/abs/b", "c:\\d"]
    assert images_of(table) == [[b"a"], [b"b"], [b"c"]]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.tar"]


def test_folders_hidden_files_and_files_without_extension_are_no_samples(tmp_path) -> None:
    write(tmp_path / "x.tar", [("README", b"r"), ("._1.jpg", b"mac"), ("d/.hidden.jpg", b"h"), ("1.jpg", b"one")])
    assert images_of(read_all(tar_source(tmp_path))) == [[b"one"]]


def link(name: str, kind: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type = kind
        info.linkname = "/etc/passwd"
        tar.addfile(info)
        data = tarfile.TarInfo("z.jpg")
        data.size = 1
        tar.addfile(data, io.BytesIO(b"z"))
    return buffer.getvalue()


@pytest.mark.parametrize("type_", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_are_never_followed(tmp_path, type_) -> None:
    (tmp_path / "x.tar").write_bytes(link("a.jpg", type_))
    table = read_all(tar_source(tmp_path))
    assert outcomes(table) == {"x.tar#0": "broken_sample", "x.tar#1": ""}
    assert images_of(table) == [[], [b"z"]]


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ([("b.txt", b"no image")], "missing_image"),
        ([("b.jpg", b"x" * 101)], "image_too_large"),
        ([("b.jpg", b"1"), ("b.jpg", b"2")], "broken_sample"),
        ([("b.jpg", b"1"), ("b.json", b"{")], "broken_sample"),
        ([("b.jpg", b"1"), ("b.json", b"[" * 100_000)], "broken_sample"),
        ([("b.jpg", b"1"), ("b.json", b"9" * 10_000)], "broken_sample"),
        ([("b.jpg", b"1"), ("b.txt", b"\xff\xfe\xfa")], "broken_sample"),
    ],
)
def test_an_unusable_sample_is_one_error_row_between_good_ones(tmp_path, members, code) -> None:
    good = [("a.jpg", b"a"), ("a.txt", b"A")], [("c.jpg", b"c"), ("c.txt", b"C")]
    write(tmp_path / "x.tar", [*good[0], *members, *good[1]])
    table = read_all(tar_source(tmp_path, max_image_bytes=100), keep=("txt",))
    assert outcomes(table) == {"x.tar#0": "", "x.tar#1": code, "x.tar#2": ""}
    assert table["txt"].to_pylist()[::2] == ["A", "C"]


def test_a_text_member_beyond_the_bound_is_not_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tars, "TEXT_MAX_BYTES", 10)
    write(tmp_path / "x.tar", [("a.jpg", b"a"), ("a.txt", b"T" * 11), ("b.jpg", b"b"), ("b.txt", b"T" * 10)])
    assert outcomes(read_all(tar_source(tmp_path), "{txt}")) == {"x.tar#0": "broken_sample", "x.tar#1": ""}


def test_damaged_text_matters_only_where_text_is_asked_for(tmp_path) -> None:
    write(tmp_path / "x.tar", [("a.jpg", b"a"), ("a.json", b"{")])
    assert outcomes(read_all(tar_source(tmp_path))) == {"x.tar#0": ""}


def test_lone_surrogates_and_bytes_in_names_stay_out_of_the_table(tmp_path) -> None:
    members = [("a.jpg", b"a"), ("a.json", b'{"t": "x\\ud800"}'), ("b\udcff.jpg", b"b"), ("b\udcff.txt", b"t")]
    write(tmp_path / "x.tar", members)
    table = read_all(tar_source(tmp_path), "{t}", keep=("t", "__key__"))
    assert table["t"].to_pylist() == ["x\ufffd", None]
    assert table["__key__"].to_pylist() == ["a", "b\ufffd"]


def test_a_field_that_the_first_samples_lack_is_refused_by_name(tmp_path) -> None:
    write(tmp_path / "x.tar", samples(2))
    message = r"^prompt\.text: the column 'nope' is not in the first 16 samples of x\.tar; columns there: __key__, n"
    with pytest.raises(ConfigError, match=message):
        read_all(tar_source(tmp_path), "{nope}")
    with pytest.raises(ConfigError, match=r"^sink\.keep_columns: the column 'nope'"):
        read_all(tar_source(tmp_path), keep=("nope",))


WHOLE = tar_bytes(samples(5))
MEMBERS_END = 5 * 4 * 512  # each sample is two members of a header and one block of data


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty file"),
        pytest.param(b"not a tar at all" * 100, id="no tar"),
        pytest.param(WHOLE[:300], id="cut in the first header"),
        pytest.param(WHOLE[: 4 * 2048 + 600], id="cut in a member"),
        pytest.param(WHOLE[: 4 * 2048 + 1024], id="cut between two members of a sample"),
        pytest.param(WHOLE[:MEMBERS_END], id="cut before the end marker"),
        pytest.param(WHOLE[:8192] + b"\xff" * 512 + WHOLE[8704:], id="damaged header"),
        pytest.param(WHOLE + tar_bytes([("late.jpg", b"late")]), id="two archives in one file"),
        pytest.param(gzip.compress(WHOLE)[:-60], id="truncated gzip"),
        pytest.param(b"\x1f\x8b" + b"\0" * 400, id="no gzip behind its magic"),
    ],
)
def test_a_damaged_archive_gives_the_samples_before_it_and_one_error_row(tmp_path, data) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    table = read_all(tar_source(tmp_path))
    codes = outcomes(table)
    num_good = len(codes) - 1
    assert list(codes) == [f"x.tar#{number}" for number in range(num_good + 1)]
    assert list(codes.values()) == [""] * num_good + ["broken_shard"]
    assert images_of(table)[:num_good] == [[f"image {number}".encode()] for number in range(num_good)]
    assert table["error_message"][num_good].as_py().startswith("x.tar: cannot be read from row ")


@pytest.mark.parametrize(("cut", "num_good"), [(8192 + 1024, 4), (MEMBERS_END, 4), (3 * 2048 + 700, 3)])
def test_the_sample_in_which_damage_begins_is_an_error_row(tmp_path, cut, num_good) -> None:
    (tmp_path / "x.tar").write_bytes(WHOLE[:cut])
    codes = list(outcomes(read_all(tar_source(tmp_path))).values())
    assert codes == [""] * num_good + ["broken_shard"]


def test_an_extended_header_that_claims_gigabytes_is_not_read(tmp_path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 3 * 2**30
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + WHOLE)
    table = read_all(tar_source(tmp_path))
    assert outcomes(table) == {"x.tar#0": "broken_shard"}
    assert "3221225472 bytes" in table["error_message"][0].as_py()


def test_a_negative_size_is_damage_and_no_endless_loop(tmp_path) -> None:
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf())
    header[124:136] = b"\xff" * 12  # base-256 for -1
    header[148:156] = b"        "
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    (tmp_path / "x.tar").write_bytes(bytes(header) + WHOLE)
    assert outcomes(read_all(tar_source(tmp_path))) == {"x.tar#0": "broken_shard"}


def test_an_empty_archive_has_no_samples(tmp_path) -> None:
    write(tmp_path / "x.tar", [])
    assert read_all(tar_source(tmp_path)).num_rows == 0


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 100])
def test_a_limit_counts_into_archives_of_unknown_length(tmp_path, limit) -> None:
    write(tmp_path / "a.tar", samples(4))
    (tmp_path / "b.tar").write_bytes(WHOLE[: 2 * 2048 + 700])
    write(tmp_path / "c.tar", samples(2))
    source = tar_source(tmp_path)
    frozen = freezing.freeze(source, PromptOptions(PromptConfig(text="x")))
    everything = list(outcomes(read_all(source)))
    assert everything == [f"a.tar#{n}" for n in range(4)] + [f"b.tar#{n}" for n in range(3)] + ["c.tar#0", "c.tar#1"]
    assert list(outcomes(datasource.read_first(source, frozen, (), limit))) == everything[:limit]
    spans = datasource.SpanDatasource(source, frozen, (), limit)
    blocks = [list(task()) for task in spans.get_read_tasks(1)]
    assert [id_ for [block] in blocks for id_ in block["sample_id"].to_pylist()] == everything[:limit]


def cut_into(source: SourceConfig, span_bytes: int) -> tuple[int, pa.Table]:
    """How many spans there are, and what they give."""
    source = source.model_copy(update={"span_max_bytes": span_bytes})
    spans = datasource.SpanDatasource(
        source, freezing.freeze(source, PromptOptions(PromptConfig(text="{n}")), ("n",)), ("n",)
    )
    return spans.num_spans, pa.concat_tables(next(iter(task())) for task in spans.get_read_tasks(1))


@pytest.mark.parametrize("span_bytes", [1, 1500, 2048, 5000, 9000])
def test_a_large_plain_archive_is_cut_at_its_headers_and_gives_the_same_samples(tmp_path, span_bytes) -> None:
    write(
        tmp_path / "x.tar", [("hello/README", b"skip"), *samples(6), (f"{'long' * 60}.jpg", b"l"), ("z.mp4", b"film")]
    )
    source = tar_source(tmp_path)
    num_whole, whole = cut_into(source, 10**9)
    num_spans, parts = cut_into(source, span_bytes)
    assert num_whole == 1
    assert num_spans == {1: 8, 1500: 8, 2048: 8, 5000: 5, 9000: 3}[span_bytes]
    assert parts.equals(whole)
    [[film]] = parts["videos"].to_pylist()[-1:]
    data = (tmp_path / "x.tar").read_bytes()
    assert data[film["offset"] : film["offset"] + film["size"]] == b"film"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(tar_bytes([*samples(2), ("000.txt", b"late")]), id="a key that comes back"),
        pytest.param(tar_bytes(samples(5))[: 4 * 2048 + 600], id="damaged"),
        pytest.param(gzip.compress(tar_bytes(samples(5))), id="compressed"),
        pytest.param(tar_bytes(samples(5), pax_headers={"comment": "for all"}), id="headers for all members"),
    ],
)
def test_an_archive_that_cannot_be_cut_is_one_span(tmp_path, data) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    num_spans, parts = cut_into(tar_source(tmp_path), 1)
    assert num_spans == 1
    assert parts.num_rows >= 2


def test_a_cut_archive_that_changes_after_the_listing_loses_no_row(tmp_path) -> None:
    write(tmp_path / "x.tar", samples(6))
    source = tar_source(tmp_path, span_max_bytes=4096)
    spans = datasource.SpanDatasource(source, freezing.freeze(source, PromptOptions(PromptConfig(text="x"))))
    tasks = spans.get_read_tasks(1)
    assert (spans.num_samples, len(tasks)) == (6, 4)
    write(tmp_path / "x.tar", samples(3))
    table = pa.concat_tables(next(iter(task())) for task in tasks)
    assert outcomes(table) == {f"x.tar#{n}": "" if n < 3 else "broken_shard" for n in range(6)}


KEYS = st.text(st.characters(exclude_characters="./\0", codec="utf-8"), min_size=1, max_size=20)
SAMPLES = st.dictionaries(
    KEYS,
    st.tuples(st.binary(max_size=1500), st.none() | st.text(st.characters(codec="utf-8"), max_size=20)),
    min_size=1,
    max_size=8,
)


def memory_tar(data: bytes) -> SourceConfig:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/tars/x.tar", data)
    return tar_source("memory://tars/x.tar")


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(SAMPLES)
def test_members_are_read_as_they_were_written(written) -> None:
    members: Members = []
    for key, (image, text) in written.items():
        members.append((f"{key}.jpg", image))
        if text is not None:
            members.append((f"{key}.txt", text.encode()))
    source = memory_tar(tar_bytes([*members, ("last.jpg", b""), ("last.txt", b"")]))
    table = read_all(source, "{txt}", keep=("__key__",)).slice(0, len(written))
    assert table["__key__"].to_pylist() == list(written)
    assert images_of(table) == [[image] for image, _ in written.values()]
    texts = [json.loads(fields)["txt"] for fields in table["fields"].to_pylist()]
    assert [text if text is None else text.removeprefix("\ufeff") for _, text in written.values()] == texts


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(WHOLE)),
)
def test_ids_stay_unique_and_in_order_under_any_damage(flips, end) -> None:
    data = bytearray(WHOLE)
    for position, value in flips:
        data[position] = value
    source = memory_tar(bytes(data[:end]))
    codes = outcomes(read_all(source, "{n}") if not flips and end == len(WHOLE) else read_all(source))
    assert list(codes) == [f"x.tar#{number}" for number in range(len(codes))]
    assert set(codes.values()) <= {"", "broken_shard", "broken_sample", "missing_image", "image_too_large"}
    assert "broken_shard" not in list(codes.values())[:-1]
    if end < MEMBERS_END:
        assert list(codes.values())[-1] == "broken_shard"
