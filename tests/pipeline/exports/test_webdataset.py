"""New tars hold the members of the source's byte by byte, and one caption in each finished sample."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from pipeline.exports import archives
from tests.pipeline.attempts import job, run
from tests.pipeline.exports.small_jobs import RED, export, members, records, some_tars, tar_job
from tests.pipeline.formats.shards import tar_bytes

MEMBERS = "caption.txt"


def contents(data: bytes) -> list[tuple[str, bytes]]:
    """Names and bytes of regular members in order, by the standard library."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar if member.isreg()]  # type: ignore[union-attr]


def with_captions(original: list[tuple[str, bytes]], source: str) -> list[tuple[str, bytes]]:
    """What is expected: after the last member of each sample, its caption."""
    entries = []
    for index, (name, data) in enumerate(original):
        entries.append((name, data))
        key = name.split(".")[0]
        if index + 1 == len(original) or original[index + 1][0].split(".")[0] != key:
            number = len({name.split(".")[0] for name, _ in original[: index + 1]}) - 1
            entries.append((f"{key}.caption.txt", f"text of {source}#{number}".encode()))
    return entries


def headers(data: bytes) -> dict[str, bytes]:
    """The raw blocks of every member, its extended headers included."""
    bytes_of = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            bytes_of[member.name] = data[member.offset : member.offset_data + (member.size + 511) // 512 * 512]
    return bytes_of


def test_tars_have_the_same_names_and_members_and_the_captions(tmp_path) -> None:
    tars = some_tars()
    tar_job(tmp_path, tars)
    [report] = export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    assert (report.num_written, report.num_parts, report.num_refused) == (10, 3, 0)
    for name, data in tars.items():
        new = (tmp_path / "new" / name).read_bytes()
        assert contents(new) == with_captions(contents(data), name)
        assert new[:2] == data[:2]
    plain = headers((tmp_path / "new/a.tar").read_bytes())
    assert {name: plain[name] for name in headers(tars["a.tar"])} == headers(tars["a.tar"])
    assert sorted(path.name for path in (tmp_path / "new").rglob("*")) == ["a.tar", "b", "c.tar", "e.tar.gz"]
    stats = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("*.tar*")}
    assert export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})[0].num_parts == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("*.tar*")} == stats


def test_new_tars_are_read_as_a_source_again(tmp_path) -> None:
    tar_job(tmp_path, some_tars())
    export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    source = {"kind": "webdataset", "path": str(tmp_path / "new")}
    plan = run(job(source, tmp_path / "second", prompt={"text": "{caption}"}))
    assert plan.read_first(10)["fields"].to_pylist()[:2] == [
        json.dumps({"caption": f"text of a.tar#{number}"}) for number in range(2)
    ]


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_tars_stay_compressed_alike(tmp_path, mode) -> None:
    name = f"a.tar.{mode[2:]}"
    tar_job(tmp_path, {name: tar_bytes(members(3), mode)})
    export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    new = (tmp_path / "new" / name).read_bytes()
    assert archives.compression_of(io.BytesIO(new)) == {"gz": "gzip"}.get(mode[2:], mode[2:])
    assert contents(new) == with_captions(members(3), name)


def test_zstd_tars_stay_compressed(tmp_path) -> None:
    import pyarrow as pa

    data = pa.compress(tar_bytes(members(3)), "zstd", asbytes=True)
    tar_job(tmp_path, {"a.tar.zst": data})
    export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    new = pa.CompressedInputStream(pa.BufferReader((tmp_path / "new/a.tar.zst").read_bytes()), "zstd").read()
    assert contents(new) == with_captions(members(3), "a.tar.zst")


def test_samples_without_a_result_are_left_out_and_listed_until_they_have_one(tmp_path) -> None:
    config = tar_job(tmp_path, {"a.tar": tar_bytes(members(4))}, fails=lambda own: own == "a.tar#1")
    section = {"kind": "webdataset", "path": str(tmp_path / "new")}
    [report] = export(tmp_path / "out", section)
    assert (report.num_written, report.num_left_out) == (3, 1)
    expected = with_captions(members(4), "a.tar")
    assert contents((tmp_path / "new/a.tar").read_bytes()) == [member for member in expected if "001" not in member[0]]
    [record] = records(tmp_path / "out", "webdataset")
    [left] = record["left_out"]
    assert (left["sample_id"], left["error_type"]) == ("a.tar#1", "engine_died")
    from pipeline.run.job_plan import ResumeOptions

    run(config, ResumeOptions(retry_errors=True))
    [report] = export(tmp_path / "out", section)
    assert (report.num_parts, report.num_written, report.num_left_out) == (1, 4, 0)
    assert contents((tmp_path / "new/a.tar").read_bytes()) == expected


def test_a_tar_of_a_running_job_waits_until_all_of_its_samples_have_rows(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.tar", "b.tar"):
        (tmp_path / "in" / name).write_bytes(tar_bytes(members(6)))
    config = job({"kind": "webdataset", "path": str(tmp_path / "in")}, tmp_path / "out", sink={"rows_per_file": 4})
    from tests.pipeline.attempts import make_rows, plan_of, save, start

    plan, begun = start(plan_of(config))
    batches = make_rows(plan, 1)
    save(plan, begun, batches[:2])
    section = {"kind": "webdataset", "path": str(tmp_path / "new")}
    [report] = export(tmp_path / "out", section)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.tar"]
    assert report.num_written == 6
    run(config)
    assert export(tmp_path / "out", section)[0].num_written == 6
    assert contents((tmp_path / "new/b.tar").read_bytes()) == with_captions(members(6), "b.tar")


@pytest.mark.parametrize(("existing", "expected"), [("skip", b"mine"), ("overwrite", b"text of a.tar#0")])
def test_a_member_of_this_name_is_left_or_replaced(tmp_path, existing, expected) -> None:
    data = tar_bytes([("1.caption.txt", b"mine"), ("1.png", RED), ("2.png", RED)])
    tar_job(tmp_path, {"a.tar": data})
    [report] = export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new"), "existing": existing})
    new = contents((tmp_path / "new/a.tar").read_bytes())
    assert dict(new)["1.caption.txt"] == expected
    assert [name for name, _ in new].count("1.caption.txt") == 1
    assert (report.num_written, report.num_existing) == ((1, 1) if existing == "skip" else (2, 0))


def test_a_json_member_holds_the_columns(tmp_path) -> None:
    tar_job(tmp_path, {"a.tar": tar_bytes(members(1))})
    section = {"kind": "webdataset", "path": str(tmp_path / "new"), "extension": "out.json"}
    export(tmp_path / "out", section)
    record = dict(contents((tmp_path / "new/a.tar").read_bytes()))["d/000.out.json"]
    assert json.loads(record) == {"sample_id": "a.tar#0", "generated_text": "text of a.tar#0"}


# --- hostile archives ----


def raw_tar(entries: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.GNU_FORMAT, **options: object) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as tar:  # type: ignore[call-overload]
        for info, data in entries:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def test_keys_that_leave_the_root_are_refused_and_the_rest_is_written(tmp_path) -> None:
    names = ["../x.png", "ok.png", "/abs.png", "d/../../y.png"]
    tar_job(tmp_path, {"a.tar": raw_tar([(tarfile.TarInfo(name), RED) for name in names])})
    [report] = export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    assert [name for name, _ in contents((tmp_path / "new/a.tar").read_bytes())] == ["ok.png", "ok.caption.txt"]
    assert (report.num_written, report.num_refused) == (1, 3)
    [record] = records(tmp_path / "out", "webdataset")
    assert {row["error_type"] for row in record["refused"]} == {"export_refused"}


def test_a_tar_that_is_cut_short_keeps_its_whole_samples(tmp_path) -> None:
    whole = tar_bytes(members(4))
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        cut = tar.getmembers()[5].offset_data + 3
    tar_job(tmp_path, {"a.tar": whole[:cut]})
    [report] = export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    assert contents((tmp_path / "new/a.tar").read_bytes()) == with_captions(members(2), "a.tar")
    assert (report.num_written, report.num_left_out, report.num_refused) == (2, 1, 0)


def test_folders_hidden_members_long_names_and_global_headers_are_copied(tmp_path) -> None:
    folder = tarfile.TarInfo("d")
    folder.type = tarfile.DIRTYPE
    long = "d/" + "x" * 150 + "é.png"
    entries = [(folder, b""), (tarfile.TarInfo("d/.hidden"), b"h"), (tarfile.TarInfo(long), RED)]
    for form, options in ((tarfile.GNU_FORMAT, {}), (tarfile.PAX_FORMAT, {"pax_headers": {"comment": "global"}})):
        target = tmp_path / str(form)
        data = raw_tar(entries, form, **options)
        tar_job(target, {"a.tar": data})
        export(target / "out", {"kind": "webdataset", "path": str(target / "new")})
        new = (target / "new/a.tar").read_bytes()
        assert contents(new) == [("d/.hidden", b"h"), (long, RED), (long[:-3] + "caption.txt", b"text of a.tar#0")]
        assert {name: headers(new)[name] for name in headers(data)} == headers(data)
        with tarfile.open(fileobj=io.BytesIO(new)) as tar:
            assert tar.getmembers()[0].isdir()
            assert tar.pax_headers == options.get("pax_headers", {})


def test_samples_whose_members_are_not_side_by_side_are_left_out(tmp_path) -> None:
    tar_job(tmp_path, {"a.tar": tar_bytes([("1.png", RED), ("2.png", RED), ("1.txt", b"late")])})
    [report] = export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    assert [name for name, _ in contents((tmp_path / "new/a.tar").read_bytes())] == ["2.png", "2.caption.txt"]
    assert (report.num_written, report.num_left_out) == (1, 1)


NAME = st.text("ab/.", min_size=1, max_size=5)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(NAME, st.binary(max_size=1100)), max_size=8), st.sets(st.integers(0, 8)), st.booleans())
def test_copied_members_are_the_chosen_ones_byte_by_byte(entries, chosen, overwrite) -> None:
    entries = [(f"r/{name}", data) for name, data in entries if ".." not in name.split("/")]
    data = raw_tar([(tarfile.TarInfo(name), content) for name, content in entries])
    captions = {index: b"caption %d" % index for index in chosen}
    sink = io.BytesIO()
    copied = archives.copy_with(io.BytesIO(data), sink, captions, "b", overwrite)
    new = contents(sink.getvalue())
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = [member.name for member in tar]
    keys: dict[str, int] = {}
    expected = []
    for name, (_, content) in zip(names, entries, strict=True):
        parts = archives.split_name(name)
        index = None if parts is None else keys.setdefault(parts[0], len(keys))
        if index is None or (index in chosen and not (overwrite and parts[1] == "b")):
            expected.append((name, content))
    own = [(name, content) for name, content in new if content.startswith(b"caption ")]
    assert [member for member in new if member not in own] == expected
    assert {int(content.split()[1]) for _, content in own} == copied.written
    assert len(own) == len(copied.written)
    assert copied.written | copied.existing == chosen & set(keys.values())
    assert len(sink.getvalue()) % tarfile.RECORDSIZE == 0


# --- refusals ----


def test_a_folder_with_files_of_the_user_is_refused_and_untouched(tmp_path) -> None:
    tar_job(tmp_path, some_tars())
    (tmp_path / "new").mkdir()
    (tmp_path / "new/a.tar").write_bytes(b"mine")
    with pytest.raises(ConfigError, match=r"exports\.0\.path: .*new is not empty: it holds a\.tar"):
        export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
    assert (tmp_path / "new/a.tar").read_bytes() == b"mine"


@pytest.mark.parametrize(("folder", "message"), [("in/new", "inside the source"), ("out/new", "is inside the other")])
def test_a_folder_inside_of_source_or_output_is_refused(tmp_path, folder, message) -> None:
    tar_job(tmp_path, some_tars())
    with pytest.raises(ConfigError, match=message):
        export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / folder)})


def test_tars_that_changed_since_the_job_are_refused(tmp_path) -> None:
    tar_job(tmp_path, some_tars())
    Path(tmp_path / "in/a.tar").write_bytes(tar_bytes(members(6)))
    with pytest.raises(ConfigError, match=r"source\.path: a\.tar: other \(size, etag or time\)"):
        export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})


def test_another_source_is_refused(tmp_path) -> None:
    from tests.pipeline.exports.small_jobs import image_job

    image_job(tmp_path, ["a.png"])
    with pytest.raises(ConfigError, match=r"exports\.0: .* source\.kind is 'images'; exports of kind dataset"):
        export(tmp_path / "out", {"kind": "webdataset", "path": str(tmp_path / "new")})
