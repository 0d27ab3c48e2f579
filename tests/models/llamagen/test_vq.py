"""Tests the VQ model against a second, functional implementation, and the loading of its files."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.llamagen.shape import VqShape
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq, read_vq_shape, save_vq
from models.loading.checkpoints import CheckpointError, CheckpointRef

CPU = torch.device("cpu")
# Two of LlamaGen's own ladders at a 16th of their width, one with groups of several channels, one with one block.
SHAPES = {
    "16": VqShape(codebook_size=40, code_dim=8, channels=8, multipliers=(1, 1, 2, 2, 4), latent_dim=16),
    "8": VqShape(codebook_size=40, code_dim=8, channels=8, multipliers=(1, 2, 2, 4), latent_dim=16),
    "wide": VqShape(codebook_size=23, code_dim=5, channels=64, multipliers=(1, 2), num_res_blocks=1, latent_dim=12),
}


def tiny(name: str = "8", seed: int = 0) -> Vq:
    """A VQ model with weights far from their starting values, norms included, and codes of many lengths."""
    torch.manual_seed(seed)
    vq = Vq(SHAPES[name])
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in vq.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    vq.codebook.data *= torch.rand(len(vq.codebook), 1, generator=generator) * 5 + 0.1
    return vq.requires_grad_(False).eval()


def pixels(vq: Vq, rows: int = 2, columns: int = 3, num: int = 2, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    side = vq.shape.factor
    return torch.rand(num, 3, rows * side, columns * side, generator=generator) * 2 - 1


class Oracle:
    """The same network once more, as functions of a state dict under the public names."""

    def __init__(self, state: dict[str, Tensor], levels: int, blocks: int) -> None:
        self.state = {name: value.double() for name, value in state.items()}
        self.levels, self.blocks = levels, blocks

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = self.state[f"{name}.weight"]
        pad = weight.shape[-1] // 2 if stride == 1 else 0
        return F.conv2d(x, weight, self.state[f"{name}.bias"], stride=stride, padding=pad)

    def norm(self, name: str, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        groups = x.reshape(b, min(32, c), -1)
        mean, variance = groups.mean(-1, keepdim=True), groups.var(-1, unbiased=False, keepdim=True)
        flat = ((groups - mean) / (variance + 1e-6).sqrt()).reshape(b, c, h, w)
        return flat * self.state[f"{name}.weight"][:, None, None] + self.state[f"{name}.bias"][:, None, None]

    def swish(self, x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def res(self, name: str, x: Tensor) -> Tensor:
        h = self.conv(f"{name}.conv1", self.swish(self.norm(f"{name}.norm1", x)))
        h = self.conv(f"{name}.conv2", self.swish(self.norm(f"{name}.norm2", h)))
        short = f"{name}.nin_shortcut"
        return h + (self.conv(short, x) if f"{short}.weight" in self.state else x)

    def attention(self, name: str, x: Tensor) -> Tensor:
        normed = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", normed).flatten(2) for part in "qkv")
        scores = torch.einsum("bci,bcj->bij", q, k) / x.shape[1] ** 0.5
        mixed = torch.einsum("bij,bcj->bci", scores.softmax(-1), v).reshape(x.shape)
        return x + self.conv(f"{name}.proj_out", mixed)

    def middle(self, name: str, x: Tensor) -> Tensor:
        return self.res(f"{name}.2", self.attention(f"{name}.1", self.res(f"{name}.0", x)))

    def out(self, name: str, x: Tensor) -> Tensor:
        return self.conv(f"{name}.conv_out", self.swish(self.norm(f"{name}.norm_out", x)))

    def encode(self, x: Tensor) -> Tensor:
        h = self.conv("encoder.conv_in", x.double())
        for level in range(self.levels):
            name = f"encoder.conv_blocks.{level}"
            for block in range(self.blocks):
                h = self.res(f"{name}.res.{block}", h)
                if level == self.levels - 1:
                    h = self.attention(f"{name}.attn.{block}", h)
            if level < self.levels - 1:
                h = self.conv(f"{name}.downsample.conv", F.pad(h, (0, 1, 0, 1)), stride=2)
        h = self.conv("quant_conv", self.out("encoder", self.middle("encoder.mid", h))).permute(0, 2, 3, 1)
        codes = self.state["quantize.embedding.weight"]
        h = h / h.norm(dim=-1, keepdim=True)
        codes = codes / codes.norm(dim=-1, keepdim=True)
        return (h[..., None, :] - codes).square().sum(-1).argmin(-1)

    def decode(self, ids: Tensor) -> Tensor:
        codes = self.state["quantize.embedding.weight"][ids]
        h = self.conv("post_quant_conv", (codes / codes.norm(dim=-1, keepdim=True)).permute(0, 3, 1, 2))
        h = self.middle("decoder.mid", self.conv("decoder.conv_in", h))
        for level in range(self.levels):
            name = f"decoder.conv_blocks.{level}"
            for block in range(self.blocks + 1):
                h = self.res(f"{name}.res.{block}", h)
                if level == 0:
                    h = self.attention(f"{name}.attn.{block}", h)
            if level < self.levels - 1:
                h = h.repeat_interleave(2, -1).repeat_interleave(2, -2)
                h = self.conv(f"{name}.upsample.conv", h)
        return self.out("decoder", h)


def oracle(vq: Vq) -> Oracle:
    return Oracle(vq.state_dict(), len(vq.shape.multipliers), vq.shape.num_res_blocks)


@pytest.mark.parametrize("name", SHAPES)
def test_codes_and_pixels_equal_those_of_a_second_implementation(name: str) -> None:
    vq = tiny(name).double()
    image = pixels(vq)
    codes = vq.encode(image)
    assert codes.tolist() == oracle(vq).encode(image).tolist()
    assert len(codes.unique()) > 3, "one code everywhere would prove nothing"
    drawn = torch.randint(vq.shape.codebook_size, codes.shape, generator=torch.Generator().manual_seed(1))
    # The codes' directions are taken in float32.
    torch.testing.assert_close(vq.decode(drawn), oracle(vq).decode(drawn), rtol=1e-4, atol=1e-4)


def test_a_code_s_length_changes_neither_lookup_nor_picture() -> None:
    vq, other = tiny(), tiny()
    other.codebook.data *= torch.linspace(0.01, 100, len(vq.codebook))[:, None]
    image = pixels(vq)
    codes = vq.encode(image)
    assert torch.equal(other.encode(image), codes)
    torch.testing.assert_close(other.decode(codes), vq.decode(codes))


def test_the_nearest_code_of_a_scaled_code_is_that_code() -> None:
    vq = tiny()
    assert vq.quantize.nearest(vq.codebook * 7).tolist() == list(range(40))


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 3), columns=st.integers(2, 3), num=st.integers(1, 3))
def test_images_of_a_batch_do_not_depend_on_each_other(rows: int, columns: int, num: int) -> None:
    vq = tiny().double()
    image = pixels(vq, rows, columns, num)
    codes = vq.encode(image)
    assert codes.shape == (num, rows, columns)
    assert torch.cat([vq.encode(pixels[None]) for pixels in image]).tolist() == codes.tolist()
    alone = torch.cat([vq.decode(grid[None]) for grid in codes])
    torch.testing.assert_close(vq.decode(codes), alone)


def test_pixels_are_not_clamped() -> None:
    vq = tiny()
    vq.decoder.conv_out.bias.data += 9.0
    assert float(vq.decode(torch.zeros(1, 1, 2, dtype=torch.int64)).mean()) > 5


def test_bfloat16_decodes_close_to_float32() -> None:
    vq, codes = tiny(), torch.tensor([[[1, 2], [3, 4]]])
    exact = vq.decode(codes)
    rough = tiny().to(torch.bfloat16).decode(codes)
    assert rough.dtype == torch.bfloat16
    assert float((rough.float() - exact).abs().mean() / exact.abs().mean()) < 0.05


@pytest.mark.parametrize("bad", [-1, 40, 2**40])
def test_a_code_outside_the_codebook_is_named_with_its_place(bad: int) -> None:
    codes = torch.zeros(2, 2, 2, dtype=torch.int64)
    codes[1, 0, 1] = bad
    with pytest.raises(ValueError, match=rf"code {bad} at image, row, column \[1, 0, 1\].*40 codes"):
        tiny().decode(codes)


@pytest.mark.parametrize("codes", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(1, 2, 2)])
def test_codes_of_another_shape_or_type_are_refused(codes: Tensor) -> None:
    with pytest.raises(ValueError, match="codes must be whole numbers"):
        tiny().decode(codes)


@pytest.mark.parametrize("shape", [(1, 3, 15, 16), (1, 3, 0, 16), (1, 4, 16, 16), (3, 16, 16)])
def test_pixels_of_a_size_without_a_grid_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sides that 8 divides"):
        tiny().encode(torch.zeros(shape))


def test_published_ladders_have_the_public_names_and_shapes() -> None:
    with torch.device("meta"):
        vq16, vq8 = (
            Vq(VqShape(16384, multipliers=multipliers)).state_dict() for multipliers in ((1, 1, 2, 2, 4), (1, 2, 2, 4))
        )
    # Facts of the public files: 72 million and 70 million parameters.
    assert round(sum(value.numel() for name, value in vq16.items() if "used" not in name) / 1e6) == 72
    assert round(sum(value.numel() for name, value in vq8.items() if "used" not in name) / 1e6) == 70
    assert tuple(vq16["quantize.embedding.weight"].shape) == (16384, 8)
    assert tuple(vq16["quantize.codebook_used"].shape) == (65536,)
    for name in (
        "encoder.conv_blocks.4.attn.1.proj_out.weight",
        "encoder.conv_blocks.3.downsample.conv.bias",
        "encoder.conv_blocks.2.res.0.nin_shortcut.weight",
        "encoder.mid.1.q.weight",
        "decoder.conv_blocks.0.attn.2.norm.weight",
        "decoder.conv_blocks.3.upsample.conv.weight",
        "decoder.conv_blocks.4.res.2.conv2.weight",
        "decoder.norm_out.weight",
        "post_quant_conv.bias",
    ):
        assert name in vq16, name
    assert "encoder.conv_blocks.4.downsample.conv.bias" not in vq16
    assert "decoder.conv_blocks.4.upsample.conv.weight" not in vq16


@pytest.mark.parametrize("wrapper", [None, "model", "ema", "state_dict"])
def test_the_published_files_load_under_any_wrapping_key(tmp_path: Path, wrapper: str | None) -> None:
    vq = tiny()
    state = dict(vq.state_dict())
    file = tmp_path / "vq_ds8.pt"
    torch.save(state if wrapper is None else {wrapper: state, "steps": 7, "args": Namespace(lr=1.0)}, file)
    loaded = load_vq(CheckpointRef(str(file)), "float32", CPU, codebook_size=40)
    assert loaded.shape == vq.shape
    codes = vq.encode(pixels(vq))
    assert torch.equal(loaded.decode(codes), vq.decode(codes))


def test_a_saved_folder_loads_equal_and_contains_only_tensors(tmp_path: Path) -> None:
    vq = tiny("wide")
    save_vq(vq, tmp_path, torch.bfloat16)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llamagen_vq"
    assert read_vq_shape(CheckpointRef(str(tmp_path))) == vq.shape
    assert load_vq(CheckpointRef(str(tmp_path)), "auto", CPU).dtype == torch.bfloat16
    loaded = load_vq(CheckpointRef(str(tmp_path)), "float32", CPU)
    assert torch.equal(loaded.codebook, vq.codebook.bfloat16().float())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


def saved(folder: Path) -> CheckpointRef:
    save_vq(tiny(), folder)
    return CheckpointRef(str(folder))


def test_a_codebook_of_another_size_than_the_gpt_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="40 codes, but the GPT draws from 4096"):
        load_vq(saved(tmp_path), "float32", CPU, codebook_size=4096)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    ref = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for change, result in (
        ({"decoder.mid.1.q.bias": None}, "decoder.mid.1.q.bias is missing"),
        ({"decoder.extra": torch.zeros(1)}, "decoder.extra is not known"),
        ({"quant_conv.bias": torch.zeros(9)}, r"quant_conv.bias has shape \[9\]"),
        ({"encoder.conv_in.weight": None}, "no VQ model"),
        ({"quantize.embedding.weight": torch.zeros(40)}, "no VQ model"),
        ({"encoder.conv_blocks.1.res.0.conv1.weight": torch.zeros(9, 8, 3, 3)}, "do not fit"),
    ):
        save_file({n: v for n, v in (whole | change).items() if v is not None}, file)
        with pytest.raises(CheckpointError, match=result):
            load_vq(ref, "float32", CPU)


@pytest.mark.parametrize("name", ["model.safetensors", "vq.pt"])
def test_a_torn_file_is_named(tmp_path: Path, name: str) -> None:
    save_vq(tiny(), tmp_path)
    torch.save(tiny().state_dict(), tmp_path / "vq.pt")
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=f"{name}.*cannot be read"):
        load_vq(CheckpointRef(str(tmp_path / name)), "float32", CPU)


def test_a_file_of_a_gpt_is_not_loaded_as_a_vq_model(tmp_path: Path) -> None:
    torch.save({"tok_embeddings.weight": torch.zeros(4, 4)}, tmp_path / "t2i.pt")
    with pytest.raises(CheckpointError, match=r"no VQ model of LlamaGen's family: it holds tok_embeddings\.weight"):
        read_vq_shape(CheckpointRef(str(tmp_path / "t2i.pt")))


def test_widths_without_even_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 32 channels wide or a multiple of 32, not 48"):
        VqShape(codebook_size=4, channels=16, multipliers=(1, 3))
