"""Tests that noise equals reference Philox, is uniform, and depends only on the sample."""

from __future__ import annotations

import pytest
import torch

from decoding.noise import Noise, Stream, key_of, philox

ZERO, ONES = 0, 0xFFFFFFFF
PUBLISHED = [
    ((ZERO,) * 4, (ZERO,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == expected


def noise(*samples: str, position: int = 0) -> Noise:
    return Noise(torch.tensor([key_of(1, name, 0) for name in samples]), torch.full((len(samples),), position))


def test_a_draw_does_not_depend_on_the_batch_or_on_how_far_ahead_it_is_asked_for() -> None:
    alone = noise("b", position=4).gumbel(Stream.TOKEN, torch.tensor([0]), 50)[0, 0]
    in_company = noise("a", "b", "c", position=1).gumbel(Stream.TOKEN, torch.arange(6), 50)[1, 3]
    assert torch.equal(alone, in_company)


def test_a_draw_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    short = noise("a").gumbel(Stream.TOKEN, torch.tensor([0]), 7)
    assert torch.equal(short, noise("a").gumbel(Stream.TOKEN, torch.tensor([0]), 1001)[..., :7])


def test_streams_siblings_replicas_and_seeds_give_different_draws() -> None:
    at = torch.tensor([0])
    draws = [noise("a").gumbel(stream, at, 64).flatten() for stream in Stream]
    draws += [noise("a").gumbel(Stream.TOKEN, at, 64, sibling=1).flatten()]
    for seed, replica in ((2, 0), (1, 1)):
        draws.append(
            Noise(torch.tensor([key_of(seed, "a", replica)]), torch.zeros(1, dtype=torch.long))
            .gumbel(Stream.TOKEN, at, 64)
            .flatten()
        )
    for i, draw in enumerate(draws):
        for other in draws[:i]:
            assert float((draw - other).abs().mean()) > 0.5


def test_gumbel_noise_has_the_moments_of_the_gumbel_distribution() -> None:
    draws = noise("a", "b").gumbel(Stream.TOKEN, torch.arange(4), 50_000)
    assert float(draws.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(draws.std()) == pytest.approx(1.28255, abs=0.01)
    assert bool(torch.isfinite(draws).all())


def test_gumbel_max_draws_from_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draws = noise(*(f"s{i}" for i in range(4000))).gumbel(Stream.TOKEN, torch.tensor([0]), 4)[:, 0]
    counts = (draws + probs.log()).argmax(-1).bincount(minlength=4)
    statistic = float(((counts - 4000 * probs) ** 2 / (4000 * probs)).sum())
    assert statistic < 16.3, "chi-square with 3 degrees exceeds this once in a thousand"


def test_uniform_numbers_are_inside_the_open_interval() -> None:
    values = noise(*(f"s{i}" for i in range(2000))).uniform(Stream.ACCEPT, torch.arange(3))
    assert float(values.min()) > 0.0
    assert float(values.max()) < 1.0
    assert float(values.mean()) == pytest.approx(0.5, abs=0.02)


def test_a_million_samples_share_no_key() -> None:
    keys = {key_of(0, f"shard-{i // 1000}.tar#{i % 1000}", 0) for i in range(200_000)}
    assert len(keys) == 200_000
