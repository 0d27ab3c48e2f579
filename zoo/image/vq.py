"""Trains the image world's VQ model: first without a codebook, then with one initialised by k-means.

Contains the losses and the codebook's updates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.llamagen.shape import VqShape
from models.llamagen.vq import Vq
from zoo.training import Measured, Recipe, cosine_share, fit_adam
from zoo.world.grain import sample_grainy

VQ_SHAPE = VqShape(
    codebook_size=4096, code_dim=8, channels=8, multipliers=(1, 2, 4, 8), num_res_blocks=1, latent_dim=64
)
# Share of the training steps that run first, without a codebook.
FREE_SHARE = 0.33
COMMITMENT = 0.25
# Loss weights of coloured against grey pixels, and of colour against brightness; without them, grain uses up all codes.
COLOURED_WEIGHT = 5.0
CHROMA_WEIGHT = 3.0
# Weight of the perceptual loss: the distance of both images' features in a captioner's vision tower.
PERCEPTION = 0.05
CODE_DECAY, BETAS = 0.99, (0.9, 0.95)
# A code used less often than this share of the mean is moved onto a latent of the current batch.
DEAD_SHARE = 0.05


def pixels_of(images: list[np.ndarray] | np.ndarray) -> Tensor:
    """Convert uint8 images [96, 96, 3] to VQ inputs: float32 [n, 3, 96, 96] in [-1, 1]."""
    return torch.from_numpy(np.stack(list(images))).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def images_of(pixels: Tensor) -> list[np.ndarray]:
    """Convert decoded pixels [n, 3, H, W] to uint8 images [H, W, 3]."""
    bytes_ = (pixels.float().clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    return list(bytes_.permute(0, 2, 3, 1).numpy())


def draw_pixels(split: str, seed: int, batch_size: int) -> Iterator[Tensor]:
    """Yield batches of pixels [b, 3, 96, 96], channels last, of a split without end."""
    for start in itertools.count(step=batch_size):
        pixels = pixels_of([pixels for _, pixels, _ in sample_grainy(split, batch_size, seed, start)])
        yield pixels.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def fit_codes(latents: Tensor, weights: Tensor, num_codes: int, num_rounds: int, generator: torch.Generator) -> Tensor:
    """Fit unit-length codes [num_codes, dim] to unit-length latents [n, dim] by spherical k-means.

    Initial codes are latents drawn by `weights` [n], which set their density: k-means moves them only a little.
    """
    few = len(latents) < num_codes
    codes = latents[torch.multinomial(weights, num_codes, replacement=few, generator=generator)].clone()
    for _ in range(num_rounds):
        owner = torch.cat([(part @ codes.T).argmax(-1) for part in torch.split(latents, 4096)])
        sums = torch.zeros_like(codes).index_add_(0, owner, latents)
        empty = (torch.bincount(owner, minlength=num_codes) == 0).nonzero().flatten()
        if len(empty):
            sums[empty] = latents[torch.multinomial(weights, len(empty), replacement=few, generator=generator)]
        codes = F.normalize(sums, dim=-1)
    return codes


class CodeKeeper:
    """Updates the codebook by moving averages of the latents assigned to each code, and moves unused codes."""

    def __init__(self, vq: Vq, seed: int) -> None:
        self.codes = vq.codebook
        self.generator = torch.Generator().manual_seed(seed)
        self.counts = torch.ones(len(self.codes))
        self.sums = self.codes.detach().clone()

    @torch.no_grad()
    def update(self, latents: Tensor, owner: Tensor) -> None:
        """Update the codebook with unit-length latents [n, dim] and the codes [n] assigned to them."""
        mean = len(owner) / len(self.codes)
        frequency = torch.bincount(owner, minlength=len(self.codes)).float() / mean
        self.counts.lerp_(frequency, 1 - CODE_DECAY)
        self.sums.lerp_(torch.zeros_like(self.sums).index_add_(0, owner, latents) / mean, 1 - CODE_DECAY)
        dead = (self.counts < DEAD_SHARE).nonzero().flatten()
        if len(dead) and len(dead) <= len(latents):
            # Dead codes are moved to latents with large quantisation errors.
            error = (latents - self.codes[owner]).square().sum(-1)
            fresh = latents[torch.multinomial(error, len(dead), generator=self.generator)]
            self.sums[dead], self.counts[dead] = fresh * 0.5, 0.5
        self.codes.copy_(F.normalize(self.sums, dim=-1))


def pixel_weights(pixels: Tensor) -> Tensor:
    """Return the loss weight of each pixel, [b, 1, H, W]: higher for objects and their outlines."""
    colourful = (pixels.amax(1, keepdim=True) - pixels.amin(1, keepdim=True)) / 2
    return 1.0 + (COLOURED_WEIGHT - 1.0) * F.max_pool2d(colourful, 5, stride=1, padding=2)


def picture_loss(decoded: Tensor, pixels: Tensor, tower: nn.Module) -> Tensor:
    """Return the reconstruction loss of two batches of images: weighted pixel errors plus errors of tower features."""
    gap = decoded - pixels
    grey = gap.mean(1, keepdim=True)
    squares = grey.square() + CHROMA_WEIGHT * (gap - grey).square().mean(1, keepdim=True)
    # The tower's own normalisation: (x / 255 - 0.5) / 0.25 of bytes is twice the value in [-1, 1].
    true, features = (tower(2.0 * image).last_hidden_state[:, 1:] for image in (pixels, decoded))
    perception = F.mse_loss(features, true) / true.detach().var()
    loss: Tensor = 10 * (squares * pixel_weights(pixels)).mean() + 10 * PERCEPTION * perception
    return loss


def vq_loss(vq: Vq, pixels: Tensor, tower: nn.Module, quantised: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of images `pixels` [b, 3, H, W] in [−1, 1], their unit-length latents [n, dim] (n = b · h · w)
    and the code [n] of each. `tower` is the vision encoder of the perceptual term. Without `quantised`, the decoder
    gets latents with noise and all codes are 0."""
    latents = F.normalize(vq.latents(pixels).float(), dim=-1)  # [b, h, w, dim]
    if quantised:
        owner = vq.quantize.nearest(latents.detach())
        chosen = vq.quantize.directions().detach()[owner]
        commitment = F.mse_loss(latents, chosen) * latents.shape[-1]
        passed = latents + (chosen - latents).detach()
    else:
        owner = torch.zeros(latents.shape[:-1], dtype=torch.long)
        commitment = latents.new_zeros(())
        # Noise of about the distance to the nearest of 4096 codes prepares the decoder for quantisation.
        passed = F.normalize(latents + 0.08 * torch.randn_like(latents), dim=-1)
    loss = picture_loss(vq.render(passed), pixels, tower) + COMMITMENT * commitment
    return loss, latents.detach().flatten(0, 2), owner.flatten()


def train_vq(tower: nn.Module, recipe: Recipe, seed: int) -> Vq:
    """Train a VQ model from a seed; `tower` is the frozen vision tower of the perceptual loss."""
    torch.manual_seed(seed)
    vq = _lay_out(Vq(VQ_SHAPE), torch.channels_last)
    vq.codebook.requires_grad_(False)
    tower.requires_grad_(False).eval()
    keeper: CodeKeeper | None = None
    pool: list[tuple[Tensor, Tensor]] = []
    batches = draw_pixels("train", seed, recipe.batch)

    def step_loss(step: int) -> Measured:
        nonlocal keeper, pool
        pixels = next(batches)
        if keeper is None and step > FREE_SHARE * recipe.steps:
            generator = torch.Generator().manual_seed(seed)
            latents, weights = (torch.cat(parts) for parts in zip(*pool))
            vq.codebook.copy_(fit_codes(latents, weights, len(vq.codebook), 10, generator))
            keeper, pool = CodeKeeper(vq, seed), []
        loss, latents, owner = vq_loss(vq, pixels, tower, quantised=keeper is not None)
        if keeper is None:
            weights = F.avg_pool2d(pixel_weights(pixels), VQ_SHAPE.factor).flatten()
            pool = [*pool, (latents, weights)][-40:]
        else:
            keeper.update(latents, owner)
        return loss, {}

    fit_adam(step_loss, [p for p in vq.parameters() if p.requires_grad], *_schedule(recipe), lr=recipe.lr, betas=BETAS)
    return _lay_out(vq, torch.contiguous_format).eval()


def polish_decoder(vq: Vq, tower: nn.Module, recipe: Recipe, seed: int) -> None:
    """Train the decoder alone, in place: codes stay the same, so GPTs may be trained on them at the same time."""
    tower.requires_grad_(False).eval()
    _lay_out(vq, torch.channels_last).requires_grad_(False)
    parts = [*vq.decoder.requires_grad_(True).parameters(), *vq.post_quant_conv.requires_grad_(True).parameters()]
    batches = draw_pixels("train", seed, recipe.batch)

    def step_loss(step: int) -> Measured:
        pixels = next(batches)
        return picture_loss(vq.render(vq.quantize.directions()[vq.encode(pixels)]), pixels, tower), {}

    fit_adam(step_loss, parts, *_schedule(recipe), lr=recipe.lr, betas=BETAS)
    _lay_out(vq, torch.contiguous_format).requires_grad_(True).eval()


def _lay_out(vq: Vq, layout: torch.memory_format) -> Vq:
    """Store the weights in a memory layout, in place, and return the model."""
    vq.to(memory_format=layout)  # type: ignore[call-overload]
    return vq


def _schedule(recipe: Recipe) -> tuple[Callable[[int], float], int]:
    return cosine_share(recipe.steps, 50, 0.05), recipe.steps
