"""Pictures of all formats, layouts, profiles and orientations beside OpenCV and libvips: the same picture or an error
row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from configs.schema import PromptConfig
from pipeline.media import colour, image_decoding, pixels
from pipeline.media.video import clips
from pipeline.prompts.row_options import PromptOptions
from pipeline.rows.schemas import RowError
from tests.covering import covering
from tests.pipeline.media.pictures import readers
from tests.pipeline.media.pictures.layouts import LAYOUTS, Layout, cases
from tests.pipeline.media.pictures.profiles import spaces
from tests.pipeline.media.test_image_decoding import read_table

Case = tuple[str, str, int]
Decode = Callable[[bytes], "np.ndarray | str"]
"""A function from an encoded picture to its pixels or its error code."""


@dataclass(frozen=True)
class Difference:
    """Pictures that another reader shows otherwise, and the rule by which it is wrong."""

    reader: str
    rule: str
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    profiles: tuple[str, ...] = ("none", *spaces())
    """Profiles that apply to the layout."""

    def has(self, layout: str, profile: str) -> bool:
        return layout in self.layouts and profile in self.profiles


PREMULTIPLIED = ("tiff-rgba", "tiff-rgba-planes", "tiff-rgba-associated", "tiff-rgba16-associated")
CMYK = ("jpeg-cmyk", "jpeg-ycck", "tiff-cmyk")
DIFFERENCES = (
    Difference("opencv", "ICC.1: it ignores profiles", profiles=("p3", "adobe", "grey", "cmyk")),
    Difference("opencv", "TIFF 6.0, ExtraSamples: it ignores alpha of grey", ("tiff-la",)),
    Difference("opencv", "TIFF 6.0, ExtraSamples: it returns premultiplied colours", PREMULTIPLIED),
    Difference("opencv", "TIFF 6.0, Orientation: it misplaces tiles of turned pictures", ("tiff-tiled",)),
    Difference("opencv", "AV1, BitDepth: with alpha, it returns 10 bits as 16", ("avif-rgba10",)),
    Difference("opencv", "MIAF, irot and imir: it ignores them", ("avif-l", "avif-l10", "avif-rgb", "avif-rgb12")),
    Difference("opencv", "TIFF 6.0, MaxSampleValue: it ignores it", ("tiff-l12-in-16",)),
    Difference("libvips", "TIFF 6.0, MaxSampleValue: it ignores it", ("tiff-l12-in-16",)),
    Difference("opencv", "Netpbm, Maxval: it ignores it", ("pgm-12",)),
    Difference("libvips", "ICC.1, curv: it interpolates between 33 values of grey", profiles=("grey",)),
    Difference("libvips", "DeviceCMYK: it assumes a profile of its own", CMYK, ("none",)),
)
"""Where readers differ, the source picture shows which is right. `cmyk` pictures with a profile have no source picture:
libvips is right, because OpenCV ignores profiles."""


def used(layout: Layout, profile: str) -> str:
    """The profile if it fits the layout, otherwise `none`: a profile of another colour space is ignored."""
    space = {"grey": ("grey", "bit"), "cmyk": ("cmyk",)}.get(profile, ("rgb",))
    return profile if layout.space in space else "none"


def source_picture(layout: Layout, profile: str) -> np.ndarray | None:
    """The picture that was encoded, in sRGB over white, from 0 to 255; None if it has no exact value:
    subsampled colours, and profiles that only a colour engine computes."""
    samples = layout.samples()
    if not layout.is_exact:
        return None
    if layout.space == "cmyk":
        return None if profile == "cmyk" else 255 * (1 - samples[..., :3]) * (1 - samples[..., 3:])
    colours, alpha = (samples[..., :-1], samples[..., -1:]) if layout.alpha else (samples, 1.0)
    colours = 255 * colours if profile == "none" else spaces()[profile].to_srgb(colours)
    return np.broadcast_to(255 - alpha * (255 - colours), (*samples.shape[:2], 3))


def encoded(case: Case) -> bytes:
    name, profile, orientation = case
    layout = LAYOUTS[name]
    stored = np.ascontiguousarray(readers.UNTURNS[orientation](layout.samples()))
    return layout.encode(stored, None if profile == "none" else spaces()[profile].profile, orientation)


def shown(case: Case, data: bytes) -> dict[str, np.ndarray | None]:
    """The picture by every reader that is right, None for a reader that cannot read it."""
    layout, profile = LAYOUTS[case[0]], used(LAYOUTS[case[0]], case[1])
    found = {
        "opencv": readers.opencv(data, case[2], bool(layout.alpha)),
        "libvips": readers.libvips(data),
    }
    wrong = {one.reader for one in DIFFERENCES if one.has(case[0], profile)}
    return {"source": source_picture(layout, profile)} | {k: v for k, v in found.items() if k not in wrong}


def differs(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> bool:
    return found.shape != wanted.shape or bool(np.abs(found.astype(float) - wanted).max() > tolerance)


def check(case: Case, decode: Decode) -> None:
    """AssertionError if a picture differs from that of a reader, or has another error code than its layout."""
    layout, data = LAYOUTS[case[0]], encoded(case)
    found = decode(data)
    if layout.error or isinstance(found, str):
        assert isinstance(found, str)
        assert found == layout.error
        return
    compared = {name: picture for name, picture in shown(case, data).items() if picture is not None}
    assert compared
    assert [name for name, picture in compared.items() if differs(found, picture, layout.tolerance)] == []


@pytest.fixture(scope="module")
def decode_row() -> Iterator[Decode]:
    """Decodes a row with one picture as the tasks of a job do, in the decoders' process."""
    options = image_decoding.DecodeOptions(PromptOptions(PromptConfig(text="What?")))

    def decode(data: bytes) -> np.ndarray | str:
        [row] = image_decoding.decode_table(read_table([[data]], [{}]), options).to_pylist()
        return row["error_type"] or image_decoding.pixels(row["images"])[0]

    yield decode
    clips.close_worker()


def by_tier() -> list:
    everything = cases()
    fast, slow = (set(covering(everything, strength)) for strength in (1, 2))
    return [
        pytest.param(
            case,
            id="-".join(map(str, case)),
            marks=() if case in fast else pytest.mark.slow if case in slow else pytest.mark.full,
        )
        for case in everything
    ]


@pytest.mark.parametrize("case", by_tier())
def test_a_picture_is_as_in_other_readers_or_an_error_row(case: Case, decode_row: Decode) -> None:
    check(case, decode_row)


@pytest.mark.slow
@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda one: f"{one.reader}: {one.rule}")
def test_other_readers_are_wrong_only_where_the_table_states_it(row: Difference) -> None:
    named = [case for case in cases() if row.has(case[0], used(LAYOUTS[case[0]], case[1]))]
    read = {"opencv": lambda case, data: readers.opencv(data, case[2], bool(LAYOUTS[case[0]].alpha))}
    read["libvips"] = lambda case, data: readers.libvips(data)
    differences = 0
    for case in named:
        wanted = source_picture(LAYOUTS[case[0]], used(LAYOUTS[case[0]], case[1]))
        found = read[row.reader](case, encoded(case))
        differences += wanted is not None and found is not None and differs(found, wanted, LAYOUTS[case[0]].tolerance)
    assert differences > 0


def in_this_process(data: bytes) -> np.ndarray | str:
    try:
        return image_decoding.decode_image(data, 10_000)
    except RowError as error:
        return error.code


FAULTS: dict[str, tuple[object, str, Callable[..., object], Case]] = {
    "orientation ignored": (pixels, "_orientation", lambda image: 1, ("jpeg-rgb", "none", 6)),
    "profile ignored": (pixels, "embedded_profile", lambda image, data: None, ("png-rgb", "p3", 1)),
    "profile of CMYK ignored": (pixels, "embedded_profile", lambda image, data: None, ("tiff-cmyk", "cmyk", 1)),
    "alpha over black": (Image, "alpha_composite", lambda white, image: image, ("webp-rgba", "none", 1)),
    "16 bits truncated": (
        colour,
        "scaled",
        lambda strips, white, inverted: Image.fromarray((np.asarray(strips[0]) & 255).astype(np.uint8)),
        ("tiff-l16", "none", 1),
    ),
    "maximum ignored": (colour, "white_value", lambda image: 65535, ("tiff-l12-in-16", "none", 1)),
    "polarity ignored": (colour, "is_inverted", lambda image: False, ("tiff-l16-white-is-zero", "none", 1)),
    "an error row": (pixels, "_TURNS", {6: None}, ("jpeg-rgb", "none", 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, replacement, case = FAULTS[fault]
    check(case, in_this_process)
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        check(case, in_this_process)
