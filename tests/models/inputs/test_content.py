"""Content keys of samples: equal for equal content, and different for any difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from decoding import Request
from decoding.scheduling.admission import content_of
from models.inputs.clip import Clip
from models.inputs.content import NUM_GLANCES, Content


def picture(seed: int, size: int = 40) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def clip(seed: int = 0, fps: float = 2.0) -> Clip:
    return Clip(np.stack([picture(seed), picture(seed + 1)]), (0.0, 0.5), fps)


BASE = Request("a", "<image> what?", (picture(1),), videos=(clip(),))


def test_equal_contents_have_equal_keys() -> None:
    other = Request("b", "<image> what?", (picture(1),), seed=9, replica=2, videos=(clip(),))
    assert content_of(BASE) == content_of(other)
    assert len({content_of(BASE): 1, content_of(other): 2}) == 1
    strided = replace(other, images=(np.repeat(picture(1), 2, axis=1)[:, ::2],))
    assert content_of(BASE) == content_of(strided)


def test_every_part_of_a_prompt_changes_its_key() -> None:
    others = [
        replace(BASE, prompt="<image> who?"),
        replace(BASE, images=(picture(2),)),
        replace(BASE, images=(picture(1), picture(1))),
        replace(BASE, images=(), videos=(clip(),)),
        replace(BASE, images=(picture(1).reshape(80, 20, 3),)),
        replace(BASE, videos=(clip(3),)),
        replace(BASE, videos=(clip(fps=3.0),)),
        replace(BASE, videos=(clip(), clip())),
        replace(BASE, condition=1),
        replace(BASE, condition=np.ones((3, 4), np.float32)),
    ]
    keys = [content_of(content) for content in [BASE, *others]]
    assert len(set(keys)) == len(keys)
    # An image of one frame's size is no frame, and a class no truth value.
    frame = clip().frames[:1]
    shown_as_image = Content.shown([frame], ())
    assert shown_as_image != Content.shown([], (Clip(frame, (0.0,), 1.0),))
    assert content_of(Request("a", "", condition=1)) != content_of(Request("a", "", condition=True))


def test_one_changed_value_outside_the_hashed_positions_makes_contents_unequal() -> None:
    changed = picture(1, 100)
    positions = set(np.linspace(0, changed.size - 1, NUM_GLANCES, dtype=np.int64).tolist())
    index = next(index for index in range(changed.size) if index not in positions)
    changed.flat[index] ^= 1
    first, other = Content([picture(1, 100)]), Content([changed])
    assert hash(first) == hash(other)
    assert first != other


def test_empty_and_tiny_arrays_are_keys_too() -> None:
    assert Content([np.zeros((0, 4, 3), np.uint8)]) == Content([np.zeros((0, 4, 3), np.uint8)])
    assert Content([np.zeros((0, 4, 3), np.uint8)]) != Content([np.zeros((0, 5, 3), np.uint8)])
    assert Content([np.array(3.0)]) == Content([np.array(3.0)])
    # What is not a number is not known to be the same.
    assert Content([np.array([np.nan])]) != Content([np.array([np.nan])])


def test_a_copy_is_equal_and_independent_of_the_input() -> None:
    image = picture(1)
    own = Content.shown([image], ()).copy()
    assert own == Content.shown([picture(1)], ())
    image[:] = 0
    assert own == Content.shown([picture(1)], ())
    assert own.num_bytes == image.nbytes
