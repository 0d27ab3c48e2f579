from __future__ import annotations

import os

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.load import ConfigError
from configs.schema import PromptConfig
from configs.source import SourceColumnsConfig, SourceConfig
from pipeline.formats import kind_of
from pipeline.formats.kind import no_row_groups
from pipeline.manifest import datasource, freezing, manifest, spans, survey
from pipeline.prompts.row_options import PromptOptions
from pipeline.storage.listing import Skipped
from pipeline.storage.output_dir import OutputDir
from tests.pipeline.formats.shards import encode, images_of, outcomes, read_all, write_parquet

PROMPT = PromptOptions(PromptConfig(text="Describe."))


def images(path: object, **options) -> SourceConfig:
    return SourceConfig(kind="images", path=str(path), **options)


def paths(source: SourceConfig) -> list[str]:
    return freezing.freeze(source, PROMPT).files["path"].to_pylist()


def make(root, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def test_a_folder_is_listed_sorted_by_its_own_suffixes_without_hidden_files(tmp_path) -> None:
    make(tmp_path, "b.jpg", "a/z.PNG", "a.jpg", "Z.jpeg", "é.webp", "notes.txt", ".hidden.jpg", "_tmp/x.jpg", "._b.jpg")
    assert paths(images(tmp_path)) == ["Z.jpeg", "a.jpg", "a/z.PNG", "b.jpg", "é.webp"]
    assert paths(images(f"{tmp_path}/")) == paths(images(tmp_path))


def test_names_of_cameras_are_read_and_hidden_files_are_counted_by_reason(tmp_path) -> None:
    shown = ["_DSC1.JPG", "_edited/a.jpg", "_metadata_of_me.jpg"]
    hidden = ["._DSC1.JPG", ".a/b.jpg", "__MACOSX/c.jpg", "_temporary/d.jpg", "_delta_log/e.jpg", "_job/f.jpg"]
    make(tmp_path, *shown, *hidden, "_SUCCESS", "_committed_1", "_metadata")
    skipped = Skipped()
    _, _, files = freezing.list_source(images(tmp_path), skipped)
    assert files["path"].to_pylist() == shown
    markers = "of Spark and other writers (_SUCCESS, _metadata, _temporary, …)"
    assert skipped.counts == {
        "files that begin with a dot": 1,
        "folders that begin with a dot": 1,
        "folders of macOS (__MACOSX)": 1,
        f"files {markers}": 3,
        f"folders {markers}": 2,
        "folders of an output (_job)": 1,
    }


def test_a_glob_matches_as_written_and_its_root_is_the_fixed_part(tmp_path) -> None:
    make(tmp_path, "a/1.jpg", "a/2.bin", "b/1.jpg", "b/deep/2.jpg", "b/.h.jpg")
    assert paths(images(f"{tmp_path}/*/1.*")) == ["a/1.jpg", "b/1.jpg"]
    assert paths(images(f"{tmp_path}/b/**")) == ["1.jpg", "deep/2.jpg"]
    assert paths(images(f"{tmp_path}/a/*")) == ["1.jpg", "2.bin"]


def test_a_file_is_its_folders_only_file_even_if_its_name_looks_like_a_glob(tmp_path) -> None:
    make(tmp_path, "img[1].dat", "img1.dat")
    source = images(tmp_path / "img[1].dat")
    assert paths(source) == ["img[1].dat"]
    assert images_of(read_all(source)) == [[b"img[1].dat"]]


def test_the_same_tree_gives_the_same_ids_at_any_path(tmp_path) -> None:
    make(tmp_path, "one/a.jpg", "one/b/c.jpg")
    filesystem = fsspec.filesystem("memory")
    for name in ("a.jpg", "b/c.jpg"):
        filesystem.pipe_file(f"/bucket/one/{name}", f"one/{name}".encode())
    local, remote = read_all(images(tmp_path / "one")), read_all(images("memory://bucket/one"))
    assert local.equals(remote)
    assert local["sample_id"].to_pylist() == ["a.jpg#0", "b/c.jpg#0"]


def test_globs_and_files_at_the_top_of_a_store_have_a_root_too() -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/top-1.jpg", b"1")
    filesystem.pipe_file("/top-2.jpg", b"2")
    for path, ids in (("memory://top-*.jpg", ["top-1.jpg#0", "top-2.jpg#0"]), ("memory://top-2.jpg", ["top-2.jpg#0"])):
        assert list(outcomes(read_all(images(path))).items()) == [(id_, "") for id_ in ids]


def test_links_are_followed_below_named_folders_and_never_in_a_circle(tmp_path) -> None:
    make(tmp_path, "root/a.jpg", "root/sub/c.jpg", "other/b.jpg")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "root" / "up").symlink_to(tmp_path / "root")
    (tmp_path / "other" / "back").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "root" / "twice.jpg").symlink_to(tmp_path / "root" / "sub" / "c.jpg")
    source = images(tmp_path / "root", local_roots=(str(tmp_path / "other"),))
    assert paths(source) == ["a.jpg", "gone.jpg", "link/b.jpg", "sub/c.jpg", "twice.jpg"]
    bad = {"gone.jpg#0": "missing_image"}
    good = {f"{name}#0": "" for name in ("a.jpg", "link/b.jpg", "sub/c.jpg", "twice.jpg")}
    assert outcomes(read_all(source)) == bad | good


@pytest.mark.parametrize("target", ["other", "other/b.jpg", "/etc/passwd"])
@pytest.mark.parametrize("pattern", ["", "/*.jpg", "/**"])
def test_a_link_that_leaves_the_source_root_is_refused_by_name(tmp_path, target, pattern) -> None:
    make(tmp_path, "root/a.jpg", "other/b.jpg")
    (tmp_path / "root" / "link.jpg").symlink_to(tmp_path / target)
    with pytest.raises(
        ConfigError, match=r"^source\.path: .*root/link\.jpg .*leaves the source root; source\.local_roots"
    ):
        paths(images(f"{tmp_path}/root{pattern}"))


def test_a_name_that_is_not_utf8_is_refused_by_name(tmp_path) -> None:
    make(tmp_path, "a.jpg")
    with open(os.path.join(os.fsencode(tmp_path), b"bad\xff.jpg"), "wb"):
        pass
    with pytest.raises(ConfigError, match=r"^source\.path: the file name bad\\udcff\.jpg is not valid UTF-8"):
        paths(images(tmp_path))


@pytest.mark.parametrize("path", ["missing", "missing/*.jpg", "empty", "notes.txt/x.jpg"])
def test_a_source_without_files_is_refused(tmp_path, path) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path, "notes.txt")
    with pytest.raises(ConfigError, match=r"^source\.path: "):
        paths(images(tmp_path / path))


def test_files_without_any_row_are_refused(tmp_path) -> None:
    write_parquet(tmp_path / "x.parquet", {"q": []})
    with pytest.raises(ConfigError, match=r"^source\.path: .* hold no rows"):
        paths(SourceConfig(kind="parquet", path=str(tmp_path)))


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^source\.path: nosuchscheme://user-data cannot be opened"):
        paths(images("nosuchscheme://user-data"))


@pytest.mark.parametrize(
    ("prompt", "keep", "columns", "message"),
    [
        (
            "{size}",
            (),
            SourceColumnsConfig(),
            r"^prompt\.text: the column 'size' is asked for, but source\.kind 'images'",
        ),
        ("x", ("url",), SourceColumnsConfig(), r"^sink\.keep_columns: the column 'url' is asked for"),
        (
            "x",
            (),
            SourceColumnsConfig(image="i"),
            r"^source\.columns\.image: source\.kind 'images' has no image column",
        ),
        ("x {", (), SourceColumnsConfig(), r"^prompt\.text: a single '\{'"),
    ],
)
def test_images_have_no_columns(tmp_path, prompt, keep, columns, message) -> None:
    make(tmp_path, "a.jpg")
    with pytest.raises(ConfigError, match=message):
        freezing.freeze(images(tmp_path, columns=columns), PromptOptions(PromptConfig(text=prompt)), keep)


def test_the_manifest_is_written_as_parquet_that_lists_everything(tmp_path) -> None:
    write_parquet(tmp_path / "in" / "x.parquet", {"q": [1, 2, 3]}, row_group_size=2)
    (tmp_path / "in" / "torn.parquet").write_bytes(b"PAR1 torn")
    output = OutputDir(str(tmp_path / "out"))
    frozen = freezing.freeze(SourceConfig(kind="parquet", path=str(tmp_path / "in")), PROMPT, (), output)
    digest, part = output.list_files("_job")
    size = (tmp_path / "out/_job/manifest/part-00000.parquet").stat().st_size
    assert (part, digest[:-64]) == ("manifest/part-00000.parquet", f"digests/manifest/part-00000.parquet-{size}-")
    table = pq.read_table(tmp_path / "out/_job/manifest/part-00000.parquet")
    assert table.schema.equals(manifest.SCHEMA)
    assert table.drop_columns("token").to_pylist()[0] == {
        "path": "torn.parquet",
        "size_bytes": 9,
        "num_samples": None,
        "row_group_rows": [],
        "row_group_bytes": [],
        "row_group_lines": [],
        "repeated_rows": [],
    }
    whole = table.to_pylist()[1]
    assert (whole["path"], whole["num_samples"], whole["row_group_rows"]) == ("x.parquet", 3, [2, 1])
    assert whole["size_bytes"] == (tmp_path / "in" / "x.parquet").stat().st_size
    assert frozen.num_samples is None
    assert frozen.num_bytes == whole["size_bytes"] + 9


def test_the_token_changes_with_the_content(tmp_path) -> None:
    make(tmp_path, "a.jpg", "b.jpg")
    before = freezing.freeze(images(tmp_path), PROMPT).files["token"].to_pylist()
    assert freezing.freeze(images(tmp_path), PROMPT).files["token"].to_pylist() == before
    os.utime(tmp_path / "a.jpg", ns=(1, 1))
    after = freezing.freeze(images(tmp_path), PROMPT).files["token"].to_pylist()
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_a_thousand_images_are_few_spans_in_order(tmp_path) -> None:
    data = encode()
    for number in range(1000):
        (tmp_path / f"{number:04d}.png").write_bytes(data)
    source = images(tmp_path, span_max_rows=400)
    assert datasource.SpanDatasource(source, freezing.freeze(source, PROMPT)).num_spans == 3
    assert read_all(source)["sample_id"].to_pylist() == [f"{number:04d}.png#0" for number in range(1000)]


def test_planning_takes_bytes_per_file_and_no_objects() -> None:
    count = 200_000
    ones = pa.array(np.ones(count, np.int64))
    empty = no_row_groups(count)
    names = pa.array([f"{number:08d}.jpg" for number in range(count)])
    files = pa.table([names, ones, names, ones, empty, empty, empty, empty], schema=manifest.SCHEMA)
    planned = spans.plan(files, 1000, 10**9)
    held = list(vars(planned).values())
    assert len(planned) == 200
    assert all(isinstance(array, np.ndarray) and array.dtype.kind in "iu" for array in held)
    assert sum(array.nbytes for array in held) / count < 8


def test_ranges_are_joined_to_the_facts_of_their_files() -> None:
    facts = [(2, [1, 1], [8, 9], [1, 2]), (0, [], [], []), (3, [3], [7], [3]), (None, [], [], []), (1, [1], [5], [1])]
    ranges = pa.table([list(column) for column in zip(*facts, strict=True)], schema=survey.FACTS)
    joined = survey._of_files(ranges, np.array([0, 0, 0, 1, 1])).to_pylist()
    assert [list(row.values()) for row in joined] == [[5, [1, 1, 3], [8, 9, 7], [1, 2, 3]], [None, [], [], []]]
    joined = survey._of_files(ranges, np.array([0, 1, 1, 2, 3]))
    assert joined["row_group_rows"].to_pylist() == [[1, 1], [3], [], [1]]
    assert joined["num_samples"].to_pylist() == [2, 3, None, 1]


def test_large_files_are_cut_and_small_ones_are_grouped(monkeypatch) -> None:
    monkeypatch.setattr(survey, "RANGE_BYTES", 10)
    monkeypatch.setattr(survey, "PARTITION_BYTES", 10)
    monkeypatch.setattr(survey, "PARTITION_FILES", 3)
    sizes = [25, 0, 1, 1, 1, 10, 11]
    files = pa.table([[f"{number}.txt" for number in range(7)], sizes, [""] * 7], schema=manifest.LISTING)
    ranges, owners = survey._ranges(kind_of("text"), files)
    assert owners.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert ranges["start"].to_pylist() == [0, 10, 20, 0, 0, 0, 0, 0, 0, 10]
    assert ranges["stop"].to_pylist() == [10, 20, None, None, None, None, None, None, 10, None]
    lengths = survey._content_bytes(ranges)
    assert lengths.tolist() == [10, 10, 5, 0, 1, 1, 1, 10, 10, 1]
    parts = survey._partitions(ranges, lengths)
    assert [part.num_files for part in parts] == [1, 1, 1, 3, 2, 1, 1]
    assert pa.concat_tables([part.item for part in parts]).equals(ranges)
    assert (parts[3].first, parts[3].last) == ("1.txt", "3.txt")
    assert survey._ranges(kind_of("parquet"), files)[1].tolist() == list(range(7))
