"""Tables of neighbours: by hand, against a plain loop, on disk, and what is refused."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from models.llamagen import neighbours
from models.llamagen.neighbours import CodebookError, Proximity, cache_folder, nearest_codes, neighbour_table

#        0           1           2           3            4
PLANE = [[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.9, 0.2], [-3.0, 0.0]]


def codebook(num_codes: int, seed: int = 0, width: int = 8) -> torch.Tensor:
    return torch.randn(num_codes, width, generator=torch.Generator().manual_seed(seed))


def by_loop(codes: torch.Tensor, k: int, directions: bool) -> list[list[int]]:
    rows = [[float(x) for x in code] for code in codes]
    if directions:
        rows = [[x / math.hypot(*row) for x in row] for row in rows]
    table = []
    for own in range(len(rows)):
        others = [other for other in range(len(rows)) if other != own]
        table.append(sorted(others, key=lambda other: (round(math.dist(rows[own], rows[other]), 9), other))[:k])
    return table


def test_the_nearest_codes_of_a_plane_by_hand() -> None:
    l2 = nearest_codes(torch.tensor(PLANE), 4, Proximity("l2"))
    assert l2[0].tolist() == [3, 1, 2, 4], "distances 0.22, 1, 1.41 and 4"
    assert l2[1].tolist() == [0, 3, 2, 4]
    cosine = nearest_codes(torch.tensor(PLANE), 4, Proximity("cosine"))
    assert cosine[0].tolist() == [1, 3, 2, 4], "1 has the same direction, whatever its length"
    assert cosine[4].tolist() == [2, 3, 0, 1], "the two opposite ones come last, the lower number first"
    assert nearest_codes(torch.tensor(PLANE), 4, Proximity("l2", normalised=True)).tolist() == cosine.tolist()


@pytest.mark.parametrize(
    ("proximity", "directions"),
    [
        (Proximity("l2"), False),
        (Proximity("l2", normalised=True), True),
        (Proximity("cosine"), True),
    ],
)
def test_tables_made_in_blocks_equal_a_plain_loop(
    proximity: Proximity, directions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_DISTANCES_AT_ONCE", 7 * 90)
    codes = codebook(90)
    codes[40] = 0.5 * codes[7]
    table = nearest_codes(codes, 20, proximity)
    assert table.dtype == torch.int64
    assert table.tolist() == by_loop(codes, 20, directions)


def test_equally_near_codes_stand_in_the_order_of_their_numbers() -> None:
    codes = codebook(6)[[0, 1, 2, 0, 1, 2, 0, 3, 0]]
    table = nearest_codes(codes, 8, Proximity())
    assert table[0, :3].tolist() == [3, 6, 8], "three copies of code 0"
    assert table[6, :3].tolist() == [0, 3, 8]
    assert nearest_codes(torch.zeros(50, 3), 49, Proximity("cosine"))[20].tolist() == [*range(20), *range(21, 50)]


@pytest.mark.parametrize("metric", ["l2", "cosine", "random"])
def test_no_code_is_its_own_neighbour_and_none_comes_twice(metric: Any) -> None:
    table = nearest_codes(codebook(50), 49, Proximity(metric))
    for code, row in enumerate(table.tolist()):
        assert sorted([code, *row]) == list(range(50))


def test_the_first_neighbours_do_not_depend_on_how_many_are_kept() -> None:
    for proximity in (Proximity(), Proximity("random", seed=5)):
        wide = nearest_codes(codebook(60), 59, proximity)
        assert nearest_codes(codebook(60), 9, proximity).equal(wide[:, :9])


def test_random_neighbours_follow_the_seed_and_not_the_codes() -> None:
    one = nearest_codes(codebook(40, 0), 10, Proximity("random", seed=1))
    assert one.equal(nearest_codes(codebook(40, 1), 10, Proximity("random", seed=1)))
    assert not one.equal(nearest_codes(codebook(40, 0), 10, Proximity("random", seed=2)))
    # Every other code is as likely as any: 400 draws of 10 of 39.
    counts = torch.zeros(40)
    for seed in range(400):
        counts += torch.bincount(nearest_codes(codebook(40), 10, Proximity("random", seed=seed))[7], minlength=40)
    assert counts[7] == 0
    assert (counts[torch.arange(40) != 7] / 400 - 10 / 39).abs().max() < 0.09


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_codes_may_come_in_any_floating_type(stored: torch.dtype) -> None:
    codes = codebook(30).to(stored)
    assert nearest_codes(codes, 5, Proximity()).equal(nearest_codes(codes.double(), 5, Proximity()))


# --- on disk -------------------------------------------------------------------------------------------------------


def never(*_: Any) -> torch.Tensor:
    raise AssertionError("the table was made again")


def test_a_table_is_made_once_and_read_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = neighbour_table(codebook(50), 12, Proximity(), tmp_path)
    (file,) = tmp_path.iterdir()
    assert load_file(file)["neighbours"].dtype == np.uint16
    monkeypatch.setattr(neighbours, "nearest_codes", never)
    read = neighbour_table(codebook(50), 12, Proximity(), tmp_path)
    assert read.dtype == torch.int64
    assert read.equal(made)


def test_high_numbers_survive_sixteen_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As int16, 40,000 would come back as −25,536, and torch does not gather with uint16 at all."""
    num_codes = 40_001
    table = torch.stack([(torch.arange(num_codes) + step) % num_codes for step in (1, num_codes - 1)], dim=1)
    monkeypatch.setattr(neighbours, "nearest_codes", lambda *_: table)
    codes = torch.zeros(num_codes, 1)
    neighbour_table(codes, 2, Proximity(), tmp_path)
    read = neighbour_table(codes, 2, Proximity(), tmp_path)
    assert read[-2].tolist() == [40_000, 39_998]
    assert torch.zeros(1, num_codes).gather(1, read[-2:-1]).tolist() == [[0.0, 0.0]]


def test_more_codes_than_sixteen_bits_hold_are_kept_in_thirty_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_codes = (1 << 16) + 1
    table = (torch.arange(num_codes)[:, None] + 1) % num_codes
    monkeypatch.setattr(neighbours, "nearest_codes", lambda *_: table)
    neighbour_table(torch.zeros(num_codes, 1), 1, Proximity(), tmp_path)
    assert neighbour_table(torch.zeros(num_codes, 1), 1, Proximity(), tmp_path).equal(table)


@pytest.mark.parametrize(
    "other",
    [
        lambda folder: neighbour_table(codebook(50, seed=1), 12, Proximity(), folder),
        lambda folder: neighbour_table(codebook(50), 13, Proximity(), folder),
        lambda folder: neighbour_table(codebook(50), 12, Proximity("cosine"), folder),
        lambda folder: neighbour_table(codebook(50), 12, Proximity("l2", normalised=True), folder),
        lambda folder: neighbour_table(codebook(50).reshape(100, 4), 12, Proximity(), folder),
    ],
    ids=["codes", "k", "metric", "directions", "shape"],
)
def test_whatever_decides_the_neighbours_has_a_file_of_its_own(tmp_path: Path, other: Any) -> None:
    neighbour_table(codebook(50), 12, Proximity(), tmp_path)
    other(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_seeds_of_random_neighbours_have_files_of_their_own(tmp_path: Path) -> None:
    first, second = (neighbour_table(codebook(50), 12, Proximity("random", seed=seed), tmp_path) for seed in (0, 1))
    assert not first.equal(second)
    assert len(list(tmp_path.iterdir())) == 2


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def of_another_shape(file: Path) -> None:
    save_file({"neighbours": load_file(file)["neighbours"][:, :5].copy()}, file)


def without_the_table(file: Path) -> None:
    save_file({"other": np.zeros(3)}, file)


@pytest.mark.parametrize("tear", [cut, emptied, flipped, of_another_shape, without_the_table])
def test_a_damaged_table_is_rebuilt_with_a_warning(tmp_path: Path, tear: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = neighbour_table(codebook(50), 12, Proximity(), tmp_path)
    (file,) = tmp_path.iterdir()
    tear(file)
    with caplog.at_level(logging.WARNING):
        assert neighbour_table(codebook(50), 12, Proximity(), tmp_path).equal(made)
    assert [record.message for record in caplog.records if str(file) in record.message and "torn" in record.message]
    caplog.clear()
    assert neighbour_table(codebook(50), 12, Proximity(), tmp_path).equal(made)
    assert not caplog.records, "the file is whole again"


def test_a_write_that_fails_leaves_nothing_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(neighbours, "save_file", full)
    table = neighbour_table(codebook(50), 12, Proximity(), tmp_path)
    assert table.equal(nearest_codes(codebook(50), 12, Proximity()))
    assert "no space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_looked_into_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(self: Path) -> bool:
        raise PermissionError("permission denied")

    monkeypatch.setattr(Path, "is_file", forbidden)
    assert neighbour_table(codebook(50), 12, Proximity(), tmp_path).shape == (50, 12)
    assert "permission denied" in caplog.text


def test_a_file_where_the_folder_should_be_costs_nothing_but_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "neighbours").write_text("no folder")
    assert neighbour_table(codebook(50), 12, Proximity(), tmp_path / "neighbours").shape == (50, 12)
    assert "cannot be kept" in caplog.text


def test_without_a_folder_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_write", never)
    assert neighbour_table(codebook(50), 12, Proximity(), None).shape == (50, 12)


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "draftfleet" / "neighbours"
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert cache_folder() is None


# --- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "k", "reason"),
    [
        (codebook(50), 50, "a codebook of 50 codes has 1 to 49"),
        (codebook(50), 0, "0 neighbours are asked for"),
        (codebook(2000, width=1), 1002, "at most 1001 are kept"),
        (codebook(50)[0], 5, r"a table \(codes, numbers\)"),
        (torch.ones(50, 2, dtype=torch.long), 5, r"not torch\.int64"),
        (torch.full((50, 2), torch.nan), 5, "not finite"),
        (torch.zeros(50, 0), 5, "a table"),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_what_has_no_neighbours_is_refused(
    codes: torch.Tensor, k: int, reason: str, kept: bool, tmp_path: Path
) -> None:
    with pytest.raises(CodebookError, match=reason):
        neighbour_table(codes, k, Proximity(), tmp_path if kept else None)
    with pytest.raises(CodebookError, match=reason):
        nearest_codes(codes, k, Proximity("random"))
