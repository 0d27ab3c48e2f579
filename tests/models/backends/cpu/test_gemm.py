"""Tests the C++ bf16 GEMM: exact up to rounding, independent of other rows, no writes outside its output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.backends.cpu import gemm, packing
from models.backends.cpu.build import Library
from models.backends.cpu.gemm import BLOCK, LIBRARY, can_multiply, multiply_rows, pack_blocks

# Importing torch's own compiler warns of a part of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def noise(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def loops() -> None:
    if not can_multiply(noise(2, 2)):
        pytest.skip("this CPU does not multiply bf16 by itself, or has tile units for it")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def exact(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = input.double() @ weight.double().T
    return out if bias is None else out + bias.double()


def assert_rounded(out: Tensor, wanted: Tensor, terms: Tensor) -> None:
    """Half a place of bf16 off what is wanted, and what sums in fp32 of `terms`, all without their signs, may lose."""
    error = (out.double() - wanted).abs()
    allowed = wanted.abs() * 2.0**-8 + terms * 2.0**-20
    assert bool((error <= allowed).all()), float((error - allowed).max())


@pytest.mark.usefixtures("loops", "threads")
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 60),
    pairs=st.integers(1, 70),
    outputs=st.integers(1, 100),
    with_bias=st.booleans(),
    num_threads=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
@example(1, 1, 1, False, 1, 0)
@example(13, 3, 33, True, 3, 1)
@example(400, 40, 97, True, 2, 2)
@example(389, 600, 31, False, 5, 3)
@example(12, 1408, 1024, False, 2, 4)
def test_the_gemm_equals_the_exact_product_rounded_once(
    rows: int, pairs: int, outputs: int, with_bias: bool, num_threads: int, seed: int
) -> None:
    torch.set_num_threads(num_threads)
    input, weight = noise(rows, 2 * pairs, seed=seed), noise(outputs, 2 * pairs, seed=seed + 1)
    bias = noise(outputs, seed=seed + 2).float() if with_bias else None
    padded = None if bias is None else torch.cat([bias, torch.full((-outputs % BLOCK,), torch.nan)])
    out = multiply_rows(input, pack_blocks(weight), padded, outputs)
    terms = exact(input.abs(), weight.abs(), None if bias is None else bias.abs())
    assert_rounded(out, exact(input, weight, bias), terms)


@pytest.mark.usefixtures("loops", "threads")
@pytest.mark.parametrize("sizes", [(721, 96), (64, 1024), (3000, 8)])
def test_a_row_does_not_depend_on_other_rows_or_the_number_of_threads(sizes: tuple[int, int]) -> None:
    outputs, inputs = sizes
    input, laid = noise(450, inputs), pack_blocks(noise(outputs, inputs, seed=1))
    torch.set_num_threads(1)
    alone = torch.cat([multiply_rows(row, laid, None, outputs) for row in input.split(1)])
    for num_threads in (1, 2, 7):
        torch.set_num_threads(num_threads)
        for first, rows in ((0, 450), (0, 193), (3, 192), (5, 13), (17, 12), (40, 6), (1, 2)):
            some = multiply_rows(input[first : first + rows], laid, None, outputs)
            assert torch.equal(some, alone[first : first + rows]), (num_threads, first, rows)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("rows", [1, 7, 30])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 33, 64])
def test_a_gemm_writes_only_its_output(rows: int, outputs: int) -> None:
    input, weight = noise(rows, 64), noise(outputs, 64, seed=1)
    laid, library = pack_blocks(weight), LIBRARY.library()
    assert library is not None
    memory = torch.full((rows * outputs + 128,), 7.0, dtype=torch.bfloat16)
    address = memory.data_ptr() + 64 * memory.element_size()
    library.multiply(input.data_ptr(), laid.data_ptr(), None, address, rows, 64, outputs, 2)
    wanted = multiply_rows(input, laid, None, outputs)
    assert torch.equal(memory[64 : 64 + rows * outputs].view(rows, outputs), wanted)
    assert bool((memory[:64] == 7.0).all())
    assert bool((memory[64 + rows * outputs :] == 7.0).all())


@pytest.mark.usefixtures("loops")
def test_nan_and_infinity_stay_in_their_row_and_column() -> None:
    input, weight = noise(14, 32), noise(40, 32, seed=1)
    clean = multiply_rows(input, pack_blocks(weight), None, 40)
    input[3, 5] = torch.nan
    input[13, 0] = torch.inf
    weight[33, 2] = torch.nan
    out = multiply_rows(input, pack_blocks(weight), None, 40)
    assert bool(out[3].isnan().all())
    assert not bool(out[13].isfinite().any())
    assert bool(out[:, 33].isnan().all())
    good = [row for row in range(14) if row not in (3, 13)]
    others = [column for column in range(40) if column != 33]
    assert torch.equal(out[good][:, others], clean[good][:, others])


@pytest.mark.usefixtures("loops")
def test_inputs_may_be_strided_and_have_any_number_of_axes() -> None:
    weight = noise(24, 16, seed=1)
    laid = pack_blocks(weight)
    wide = noise(3, 5, 40)
    view = wide[:, 1::2, 8:24]
    assert not view.is_contiguous()
    out = multiply_rows(view, laid, None, 24)
    assert out.shape == (3, 2, 24)
    assert torch.equal(out, multiply_rows(view.contiguous(), laid, None, 24))
    assert multiply_rows(view[:0], laid, None, 24).shape == (0, 2, 24)


@pytest.mark.usefixtures("loops")
def test_weights_may_be_strided() -> None:
    weight = noise(64, 16, seed=1)
    memory = torch.cat([noise(3), weight.flatten()])
    assert torch.equal(pack_blocks(memory[3:].view(64, 16)), pack_blocks(weight))
    assert torch.equal(pack_blocks(weight.T.contiguous().T), pack_blocks(weight))


@pytest.mark.usefixtures("loops")
def test_layers_with_equal_inputs_are_one_gemm() -> None:
    weights, biases = [noise(size, 48, seed=size) for size in (64, 7, 33)], [noise(64), None, noise(33)]
    input = noise(2, 3, 48)
    out = packing.multiply(input, weights, biases)
    assert packing._packed[weights[0].data_ptr()].is_own_gemm
    for part, weight, bias in zip(out.split([64, 7, 33], dim=-1), weights, biases, strict=True):
        assert_rounded(part, exact(input, weight, bias), exact(input.abs(), weight.abs(), None) + 4)
    packing.forget(weight.data_ptr() for weight in weights)


def test_unsupported_dtypes_and_sizes_run_in_torch() -> None:
    assert not can_multiply(noise(4, 6).float())
    assert not can_multiply(noise(4, 6).half())
    assert not can_multiply(noise(4, 7))
    assert not can_multiply(torch.zeros(4, 6, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("source", ["this is no C++;", "other CPU"])
def test_without_a_usable_build_gemms_run_in_torch(
    source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    given = tmp_path / "given.cpp"
    own = Path(gemm.__file__).with_name("gemm.cpp").read_text()
    given.write_text(
        own.replace("__AVX512BF16__", "AN_INSTRUCTION_THAT_NO_CPU_HAS") if source == "other CPU" else source
    )
    without = Library((given,), LIBRARY._functions, "products stay torch's own")
    monkeypatch.setattr(gemm, "LIBRARY", without)
    weight, input = noise(33, 48, seed=1), noise(5, 48)
    out = packing.multiply(input, [weight], [None])
    assert not packing._packed[weight.data_ptr()].is_own_gemm
    packing.forget([weight.data_ptr()])
    torch.testing.assert_close(out, torch.nn.functional.linear(input, weight))
    assert (without.library() is not None) == (source == "other CPU")
    messages = [
        record.getMessage().partition(":")[0] for record in caplog.records if record.name == "models.backends.cpu.build"
    ]
    assert messages == ([] if source == "other CPU" else ["products stay torch's own"])
