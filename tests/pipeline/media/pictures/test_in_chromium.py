"""Pictures as Chromium shows them in an `img` element."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from docgen.screenshot import BROWSER, BROWSERS
from tests.pipeline.media.pictures.layouts import HEIGHT, LAYOUTS, PROFILES, WIDTH
from tests.pipeline.media.pictures.test_named_spaces import PNGS, avif, png_of
from tests.pipeline.media.pictures.test_other_readers import Case, differs, encoded, in_this_process, used

pytestmark = pytest.mark.slow

FORMATS = ("jpeg", "png", "webp", "gif", "bmp", "avif")
COLUMNS = 16
TOLERANCE, SUBSAMPLED_TOLERANCE = 4, 8
INK_TOLERANCE = 24
"""Of CMYK with a profile: Chromium gives a ramp of black alone a tint of red, which the profile does not have."""

SHOWN_OTHERWISE = ("numbers of BT.709", "gamma of sRGB", "primaries of P3")
"""PNGs that Chromium shows with the curve of cameras, and with the exponent 2.2 of sRGB."""


def cases() -> list[Case]:
    """Each layout of a format that Chromium reads, with each profile and two orientations. Left out are orientations of
    WebP, which Chromium ignores, and profiles of another colour space in AVIF and BMP."""
    found = []
    for name, layout in LAYOUTS.items():
        kind = name.split("-")[0]
        if kind in FORMATS and not layout.error:
            turns = (1, 6) if layout.turns and kind != "webp" else (1,)
            profiles = ("none", *(PROFILES[layout.space] if layout.profiles else ()))
            fitting = [
                one for one in profiles if kind not in ("avif", "bmp") or one == "none" or used(layout, one) == one
            ]
            found += [(name, profile, turn) for profile in fitting for turn in turns]
    return found


def page_of(pictures: list[bytes]) -> str:
    cells = [
        f'<img src="data:;base64,{b64encode(data).decode()}" style="position:absolute;'
        f'left:{number % COLUMNS * WIDTH}px;top:{number // COLUMNS * HEIGHT}px">'
        for number, data in enumerate(pictures)
    ]
    return f'<body style="background:white">{"".join(cells)}'


def test_pictures_are_as_chromium_shows_them(tmp_path: Path) -> None:
    if BROWSER is None:
        pytest.skip(f"no Chromium is installed: none of {', '.join(BROWSERS)} is in PATH")
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    pictures = {case: encoded(case) for case in cases()}
    pictures |= {("png-rgb", name, 1): png_of(name) for name in PNGS if name not in SHOWN_OTHERWISE}
    pictures |= {("avif-rgb", numbers, 1): avif(numbers) for numbers in ((12, 13), (9, 1), (1, 13), (1, 1))}
    path = tmp_path / "pictures.html"
    path.write_text(page_of(list(pictures.values())))
    with playwright.sync_playwright() as session:
        browser = session.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--force-color-profile=srgb"])
        page = browser.new_page(viewport={"width": COLUMNS * WIDTH, "height": -(-len(pictures) // COLUMNS) * HEIGHT})
        page.goto(path.as_uri())
        sizes = page.evaluate("Array.from(document.images, image => [image.naturalHeight, image.naturalWidth])")
        shot = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
        browser.close()
    wrong = []
    for number, (case, data) in enumerate(pictures.items()):
        top, left = number // COLUMNS * HEIGHT, number % COLUMNS * WIDTH
        shown = shot[top : top + HEIGHT, left : left + WIDTH]
        tolerance = TOLERANCE if LAYOUTS[case[0]].is_exact else SUBSAMPLED_TOLERANCE
        tolerance = INK_TOLERANCE if case[1] == "cmyk" else tolerance
        found = in_this_process(data)
        if sizes[number] != [HEIGHT, WIDTH] or isinstance(found, str) or differs(found, shown, tolerance):
            wrong.append(case)
    assert len(pictures) > 100
    assert wrong == []
