"""A dry run shows the first prompt that can be rendered, and the reasons of rows that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from actors.results import RowRefused
from configs.load import ConfigError
from pipeline.run.plan_text import first_usable


def row(sample_id: str, code: str = "") -> dict[str, Any]:
    return {"sample_id": sample_id, "error_type": code, "error_message": "broken" if code else ""}


def show(shown: dict[str, Any]) -> str:
    if shown["sample_id"] == "b":
        raise RowRefused("prompt_refused", "the template takes too many steps")
    return "a prompt"


def test_a_row_whose_prompt_is_refused_is_skipped() -> None:
    assert first_usable(lambda: [row("a", "not_an_image"), row("b"), row("c")], show) == "first prompt (c):\na prompt"


def test_refused_prompts_are_named_with_their_code() -> None:
    with pytest.raises(ConfigError, match=r"^source\.path: none of the first 2 rows can be used: ") as refused:
        first_usable(lambda: [row("a", "not_an_image"), row("b")], show)
    assert "a: not_an_image: broken; b: prompt_refused: the template takes too many steps" in str(refused.value)
