"""Rotary positions of images: zeros where the published table has zeros, rows and columns elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

from models.llamagen.rotary import GridRotary, join_pairs, split_pairs

X = torch.zeros(1)


def test_condition_positions_and_positions_beyond_the_image_are_zero_not_the_identity() -> None:
    rotary = GridRotary(head_dim=8, grid=3, num_condition_tokens=4)
    outside = torch.tensor([[0, 1, 2, 3, 13, 14, 500]])
    cos, sin = rotary(X, outside)
    assert cos.shape == sin.shape == (1, 7, 8)
    assert not cos.any()
    assert not sin.any()
    inside = torch.tensor([[4, 12]])
    cos, sin = rotary(X, inside)
    assert cos[0, 0].tolist() == [1.0] * 8, "the first code is not turned"
    assert cos[0, 1].abs().min() > 0


def test_half_of_the_pairs_rotate_by_row_and_half_by_column() -> None:
    rotary = GridRotary(head_dim=8, grid=3, num_condition_tokens=1, base=100.0)
    # Row 2, column 1. Speeds of a half with two pairs: 100 ** 0 and 100 ** −(2/4).
    cos, sin = rotary(X, torch.tensor([[1 + 2 * 3 + 1]]))
    angles = [2.0, 2.0 * 0.1, 1.0, 1.0 * 0.1]
    assert cos[0, 0].tolist() == pytest.approx([math.cos(a) for a in angles * 2])
    assert sin[0, 0].tolist() == pytest.approx([math.sin(a) for a in angles * 2])


def test_without_condition_columns_the_first_position_is_a_code() -> None:
    cos, _ = GridRotary(head_dim=4, grid=2, num_condition_tokens=0)(X, torch.tensor([[0, 3, 4]]))
    assert cos[0, 0].tolist() == [1.0] * 4
    assert cos[0, 1].tolist() == pytest.approx([math.cos(1.0)] * 4)
    assert cos[0, 2].tolist() == [0.0] * 4


def test_the_head_size_of_the_3b_model_has_a_row_half_and_a_column_half() -> None:
    cos, _ = GridRotary(head_dim=100, grid=24, num_condition_tokens=1)(X, torch.tensor([[1 + 5]]))
    assert cos.shape == (1, 1, 100)
    assert cos[0, 0, :25].tolist() == [1.0] * 25, "row 0 turns nothing"
    assert cos[0, 0, 25].item() == pytest.approx(math.cos(5.0))
    assert torch.equal(cos[..., :50], cos[..., 50:])


def test_the_table_survives_changes_of_type_and_is_not_saved() -> None:
    rotary = GridRotary(head_dim=8, grid=3, num_condition_tokens=1)
    before, _ = rotary(X, torch.arange(10)[None])
    rotary.to(torch.bfloat16).to(torch.float32)
    after, _ = rotary(X, torch.arange(10)[None])
    assert torch.equal(before, after)
    assert rotary(X.half(), torch.arange(10)[None])[0].dtype == torch.float16
    assert rotary.state_dict() == {}


def test_a_model_created_on_the_meta_device_has_a_rotary_table_on_the_cpu() -> None:
    with torch.device("meta"):
        rotary = GridRotary(head_dim=8, grid=3, num_condition_tokens=1)
    assert rotary.cos.device.type == "cpu"
    assert rotary.cos[1].tolist() == [1.0] * 8


def test_interleaved_rotary_pairs_are_converted_to_halves_and_back() -> None:
    rows = torch.arange(12)[:, None]  # two heads of six: (0 1)(2 3)(4 5), (6 7)(8 9)(10 11)
    split = split_pairs(rows, num_heads=2)
    assert split[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(join_pairs(split, num_heads=2), rows)
