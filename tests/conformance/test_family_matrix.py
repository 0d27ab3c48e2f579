"""Tests that the committed matrix of families is the one that its runs give."""

from __future__ import annotations

import json

import pytest

from docgen.families import families_page
from tests import toys
from tests.conformance.family_matrix import DRAFTS, FILE, REFUSED, matrix, refusal_of, row_of

COMMITTED = json.loads(FILE.read_text(encoding="utf-8"))
FAMILIES = [*toys.FAMILIES, *toys.MASKED]

pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_family_is_listed_and_proven_for_all_drafts() -> None:
    assert list(COMMITTED["families"]) == FAMILIES
    for name, row in COMMITTED["families"].items():
        assert all(drafts == list(DRAFTS) for drafts in row["proven"].values()), name
        assert f"| `{name}` |" in families_page()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4_e2b", "paligemma"])
def test_a_row_is_regenerated(family: str) -> None:
    assert row_of(family) == COMMITTED["families"][family]


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_refusal_is_regenerated(kind: str) -> None:
    assert refusal_of(kind) == COMMITTED["refused"][kind]


@pytest.mark.full
def test_the_matrix_is_regenerated() -> None:
    assert matrix(FAMILIES) == COMMITTED
