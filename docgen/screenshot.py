"""Takes a picture of a page in a headless Chromium, for the documents.

python -m docgen.screenshot out/demo/speculative/parquet/_job/report.html docs/guides/report.png
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
"""Path of an installed Chromium; None if there is none."""
COLORS = 128
"""Colours of the PNG; a page of text and charts has few."""


def take(page: Path, picture: Path, section: str, width: int, height: int, dark: bool) -> None:
    """Write `width` by `height` CSS pixels of a page, from the top or the element with the id `section`, as a PNG."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as session:
        browser = session.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        opened = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=1.5,
        ).new_page()
        opened.goto(page.resolve().as_uri())
        top = 0.0
        if section:
            box = opened.locator(f"#{section}").bounding_box()
            assert box is not None, f"{section} is not visible"
            top = box["y"]
        opened.screenshot(path=str(picture), full_page=True, clip={"x": 0, "y": top, "width": width, "height": height})
        browser.close()
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLORS).save(picture, optimize=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docgen.screenshot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--section", default="", help="id of an element; the top of the page if left out")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=1400)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args(arguments)
    if BROWSER is None:
        print(f"refused: none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 2
    take(options.page, options.picture, options.section, options.width, options.height, options.dark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
