"""The measures of images: worked Fréchet distances, and a captioner that distinguishes true prompts from false ones."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.image.quality import (
    Described,
    Reader,
    count_right,
    frechet_distance,
    image_features,
    load_reader,
    measure_described,
)
from zoo.world.grain import sample_grainy
from zoo.world.scene import Thing

STAR = Thing(2, "large", "red", "star")
RING = Thing(7, "medium", "teal", "ring")


@pytest.fixture(scope="module")
def reader() -> Reader:
    return load_reader()


def test_the_frechet_distance_of_two_gaussians_is_the_textbook_s() -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal((400, 3))
    base = (base - base.mean(0)) / base.std(0, ddof=1)
    base = base @ np.linalg.inv(np.linalg.cholesky(np.cov(base, rowvar=False))).T
    # Covariance I and diag(4, 1, 9) shifted by (1, 2, 0): 5 + (2 - 1)² + 0 + (3 - 1)².
    other = base * [2, 1, 3] + [1, 2, 0]
    assert frechet_distance(base, other) == pytest.approx(10.0)
    assert frechet_distance(other, base) == pytest.approx(10.0)
    assert frechet_distance(base, base) == pytest.approx(0.0, abs=1e-6)


def test_fewer_images_than_features_still_have_a_distance() -> None:
    rng = np.random.default_rng(1)
    few = rng.standard_normal((3, 20))
    assert frechet_distance(few, few) == pytest.approx(0.0, abs=1e-6)
    assert frechet_distance(few, few + 2) == pytest.approx(80.0)


@pytest.mark.parametrize("bad", [np.zeros((1, 3)), np.zeros((4, 2)), np.zeros(3), np.full((4, 3), np.nan)])
def test_sets_without_a_distance_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="features"):
        frechet_distance(np.eye(3), bad)


@pytest.mark.parametrize(
    ("seen", "right"),
    [
        (None, 0),
        (((STAR, RING), "dark"), 9),
        (((STAR, RING), "pale"), 8),
        (((STAR,), "dark"), 5),
        (((Thing(3, "large", "red", "star"),), "dark"), 1),
        (((Thing(2, "medium", "blue", "star"), RING), "dark"), 7),
        (((STAR, Thing(5, "large", "red", "ring"), RING), "dark"), 9),
    ],
)
def test_attributes_are_counted_where_the_prompt_puts_them(
    seen: tuple[tuple[Thing, ...], str] | None, right: int
) -> None:
    assert count_right(((STAR, RING), "dark"), seen) == right


def test_the_captioner_reads_true_pictures_and_denies_false_prompts(reader: Reader) -> None:
    samples = sample_grainy("test", 16, 5)
    images, prompts = [pixels for _, pixels, _ in samples], [prompt for _, _, prompt in samples]
    true = measure_described(reader, images, prompts)
    assert true.whole >= 15 / 16
    assert true.attributes > 0.98
    false = measure_described(reader, images, [*prompts[1:], prompts[0]])
    assert false.whole == 0
    assert false.attributes < 0.5


def test_pictures_of_any_size_are_read(reader: Reader) -> None:
    ((_, pixels, prompt),) = sample_grainy("test", 1, 5)
    twice = pixels.repeat(2, axis=0).repeat(2, axis=1)
    assert measure_described(reader, [twice], [prompt]) == Described(1.0, 1.0)


def test_noise_is_farther_from_pictures_than_other_pictures_are(reader: Reader) -> None:
    images = [pixels for _, pixels, _ in sample_grainy("test", 40, 0)]
    noise = list(np.random.default_rng(0).integers(0, 256, (20, 96, 96, 3), dtype=np.uint8))
    first, others, noisy = (image_features(reader, some) for some in (images[:20], images[20:], noise))
    near, far = frechet_distance(first, others), frechet_distance(noisy, others)
    assert 0 < near < far / 3


def test_features_do_not_depend_on_the_batch(reader: Reader) -> None:
    images = [pixels for _, pixels, _ in sample_grainy("test", 5, 0)]
    np.testing.assert_allclose(image_features(reader, images, 2), image_features(reader, images), atol=1e-4)


def test_what_cannot_be_measured_is_refused(reader: Reader) -> None:
    image = np.zeros((96, 96, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match="zip"):
        measure_described(reader, [image], [])
    with pytest.raises(ValueError, match="not a prompt of the grainy world: 'a cat'"):
        measure_described(reader, [image], ["a cat"])
