"""Tables of neighbours: by hand, against a plain loop, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from models.llamagen import neighbours
from models.llamagen.neighbours import CodebookError, Proximity, nearest_codes

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


def test_nearest_codes_of_a_plane_equal_those_computed_by_hand() -> None:
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


def test_equally_near_codes_are_sorted_by_index() -> None:
    codes = codebook(6)[[0, 1, 2, 0, 1, 2, 0, 3, 0]]
    table = nearest_codes(codes, 8, Proximity())
    assert table[0, :3].tolist() == [3, 6, 8], "three copies of code 0"
    assert table[6, :3].tolist() == [0, 3, 8]
    assert nearest_codes(torch.zeros(50, 3), 49, Proximity("cosine"))[20].tolist() == [*range(20), *range(21, 50)]


@pytest.mark.parametrize("metric", ["l2", "cosine", "random"])
def test_no_code_is_its_own_neighbour_or_is_repeated(metric: Any) -> None:
    table = nearest_codes(codebook(50), 49, Proximity(metric))
    for code, row in enumerate(table.tolist()):
        assert sorted([code, *row]) == list(range(50))


def test_the_first_neighbours_do_not_depend_on_how_many_are_kept() -> None:
    for proximity in (Proximity(), Proximity("random", seed=5)):
        wide = nearest_codes(codebook(60), 59, proximity)
        assert nearest_codes(codebook(60), 9, proximity).equal(wide[:, :9])


def test_random_neighbours_follow_the_seed_and_not_the_codes() -> None:
    table = nearest_codes(codebook(40, 0), 10, Proximity("random", seed=1))
    assert table.equal(nearest_codes(codebook(40, 1), 10, Proximity("random", seed=1)))
    assert not table.equal(nearest_codes(codebook(40, 0), 10, Proximity("random", seed=2)))
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
@pytest.mark.parametrize("metric", ["l2", "random"])
def test_codebooks_without_neighbours_are_refused(codes: torch.Tensor, k: int, reason: str, metric: Any) -> None:
    with pytest.raises(CodebookError, match=reason):
        nearest_codes(codes, k, Proximity(metric))
