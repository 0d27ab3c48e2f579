"""The demo, which is the README's first command, with fewer rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo import demo

pytestmark = pytest.mark.slow

BROKEN = {3: "not_an_image", 5: "broken_image", 20: "missing_column_value"}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.timeout(900)
def test_the_demo_accounts_for_every_row_and_shows_equal_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "OUT", tmp_path)
    monkeypatch.setattr(demo, "NUM_SCENES", 24)
    for name, index in zip(("NOT_AN_IMAGE", "TRUNCATED", "NO_QUESTION"), BROKEN, strict=True):
        monkeypatch.setattr(demo, name, index)
    monkeypatch.setattr(demo, "BROKEN", BROKEN)
    monkeypatch.setattr(demo, "NUM_VIDEOS", 4)
    monkeypatch.setattr(demo, "NUM_PROMPTS", 4)
    status = demo.main()
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "rows        24 in: 21 in data/, 3 in errors/" in printed.out
    assert "texts       equal in both runs, sample by sample" in printed.out
    assert "texts       equal in both runs, video by video" in printed.out
