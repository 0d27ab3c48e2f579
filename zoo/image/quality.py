"""Measures the image models: attributes that a captioner finds in images, Fréchet distances of two sets, and entropy.

The first two take lists of uint8 images [H, W, 3] of any size. The reader is the shipped `caption_target`, in float32,
and the features are of its vision tower; it was not trained on grain or VQ images.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from decoding import Request, Sampling
from models.llamagen.checkpoints import load_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from models.target import Target
from zoo.image.gpt import Codes, code_logits, draw_scenes, encode_scenes, pick
from zoo.image.text import load_t5
from zoo.image.vq import draw_images
from zoo.pair import CHECKPOINTS
from zoo.quality import answer_all, ask, count_matching, decode, load_target
from zoo.training import report
from zoo.world.grain import parse_prompt, render_grainy, write_prompt
from zoo.world.grammar import PROMPTS, parse_caption
from zoo.world.scene import COLOURS, SHAPES, Thing

CPU = torch.device("cpu")
# The guidance scale, of 1 to 6, at which a model's images fit their prompts best.
GUIDANCE = {"text": 2.0, "class": 2.0}
ROLES = ("target", "drafter", "class_target")
BATCH = 50
PHRASING = "inventory"
Seen = tuple[tuple[Thing, ...], str]
Reader = Target


@dataclass(frozen=True)
class Described:
    """Shares of images, and of attributes, that the captioner describes as the prompts request.

    An attribute is the tone, the presence of an object in a cell, or its size, colour or shape. Additional objects
    count against `whole` and not against `attributes`.
    """

    whole: float
    attributes: float


def load_reader(folder: Path = CHECKPOINTS) -> Reader:
    """Load the captioner from a folder of checkpoints."""
    return load_target(folder, "caption_target")


def read_images(reader: Reader, images: Sequence[np.ndarray]) -> list[Seen | None]:
    """Return the objects and the tone that the captioner reads in each image; None without a valid caption."""
    answers = answer_all(reader, [ask(PROMPTS[PHRASING], [Image.fromarray(image)], "") for image in images])
    return [caption and (caption[1][0], caption[1][1]) for caption in map(parse_caption, answers)]


def measure_described(reader: Reader, images: Sequence[np.ndarray], prompts: Sequence[str]) -> Described:
    """Compare captions of images with their prompts. Raises ValueError if there is not one prompt per image, or a
    prompt of another world."""
    whole = right = asked = 0
    for wanted, seen in zip(map(_wanted, prompts), read_images(reader, images), strict=True):
        whole += wanted == seen
        right += count_right(wanted, seen)
        asked += 1 + 4 * len(wanted[0])
    return Described(whole / len(images), right / asked)


def count_right(wanted: Seen, seen: Seen | None) -> int:
    """Return how many of the wanted attributes were read; see `Described`."""
    if seen is None:
        return 0
    return int(wanted[1] == seen[1]) + count_matching(wanted[0], seen[0])


@torch.no_grad()
def image_features(reader: Reader, images: Sequence[np.ndarray], batch_size: int = 50) -> np.ndarray:
    """Return float64 features [n, 256] of images: mean and standard deviation over the tower's patches."""
    tower, prepare = reader.model.model.vision_tower, reader.front_end.processor.image_processor
    parts = []
    for start in range(0, len(images), batch_size):
        some = [Image.fromarray(image) for image in images[start : start + batch_size]]
        patches = tower(prepare(some, return_tensors="pt")["pixel_values"]).last_hidden_state[:, 1:].double()
        parts.append(torch.cat([patches.mean(1), patches.std(1)], dim=1).numpy())
    return np.concatenate(parts)


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the squared Fréchet distance of two sets of features [n, d] taken as Gaussians (Heusel et al. 2017).

    Compare distances of equally many images only: it shrinks with their number.

    Raises:
        ValueError: a set has fewer than two members, another width, or numbers that are not finite.
    """
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1] or min(len(one), len(other)) < 2:
        raise ValueError(f"two sets of two or more features of one width are needed, not {one.shape} and {other.shape}")
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise ValueError("features must be finite numbers")
    covariances = [np.atleast_2d(np.cov(features, rowvar=False)) for features in (one, other)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # tr((A B)^½) by the symmetric matrix A^½ B A^½, whose eigenvalues are real.
    shared = np.sqrt(np.linalg.eigvalsh(root @ covariances[1] @ root).clip(0)).sum()
    gap = one.mean(0) - other.mean(0)
    return float(max(0.0, gap @ gap + np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * shared))


def measure_class(reader: Reader, images: Sequence[np.ndarray], labels: Sequence[int]) -> Described:
    """Compare captions of class-conditional images with their classes: one object, of its colour and its shape."""
    whole = right = 0
    for label, seen in zip(labels, read_images(reader, images), strict=True):
        colour, shape = COLOURS[label // len(SHAPES)], SHAPES[label % len(SHAPES)]
        found = [(thing.colour == colour) + (thing.shape == shape) for thing in seen[0]] if seen else [0]
        whole += found == [2]
        right += max(found)
    return Described(whole / len(images), right / (2 * len(images)))


def _wanted(prompt: str) -> Seen:
    wanted = parse_prompt(prompt)
    if wanted is None:
        raise ValueError(f"not a prompt of the grainy world: {prompt!r}")
    return wanted


class Gallery:
    """Held-out scenes of one kind of condition, their images and their codes."""

    def __init__(self, kind: str, num: int, seed: int, folder: Path, vq: Vq) -> None:
        scenes = draw_scenes(kind, "held_out", num, seed)
        t5, tokenizer = load_t5(folder) if kind == "text" else (None, None)
        self.prompts = [write_prompt(scene) for scene in scenes]
        self.images = [render_grainy(scene) for scene in scenes]
        self.codes: Codes = encode_scenes(kind, scenes, vq, t5, tokenizer)

    def read(self, reader: Reader, images: list[np.ndarray]) -> Described:
        """Compare images with the conditions of this gallery's scenes."""
        if self.codes.labels is None:
            return measure_described(reader, images, self.prompts)
        return measure_class(reader, images, self.codes.labels.tolist())


def measure_codes(gallery: Gallery, reader: Reader, vq: Vq) -> dict[str, float]:
    """Measure the VQ model alone: attributes read in reconstructions, similarity, use of the codebook."""
    codes = gallery.codes.codes
    images = draw_images(vq, codes, round(codes.shape[1] ** 0.5))
    errors = np.stack(gallery.images).astype(np.float64) - np.stack(images)
    shares = torch.bincount(codes.flatten(), minlength=vq.shape.codebook_size).double() / codes.numel()
    used = shares[shares > 0]
    half = len(images) // 2
    true, again = image_features(reader, gallery.images), image_features(reader, images)
    truth, seen = gallery.read(reader, gallery.images), gallery.read(reader, images)
    return {
        "truth_whole": truth.whole,
        "truth_attributes": truth.attributes,
        "reconstruction_whole": seen.whole,
        "reconstruction_attributes": seen.attributes,
        "reconstruction_psnr_db": float(10 * np.log10(255**2 / np.mean(errors**2))),
        "codes_used_share": len(used) / vq.shape.codebook_size,
        "codes_perplexity": float((-(used * used.log()).sum()).exp()),
        # Sets of the same size: half the images against the other half.
        "truth_frechet": frechet_distance(true[:half], true[half:]),
        "reconstruction_frechet": frechet_distance(again[:half], true[half:]),
    }


def draw_codes(gpt: Gpt, conditions: Codes, sampling: Sampling, seed: int) -> Tensor:
    """Draw codes [n, grid²] for conditions, by the engine without a drafter."""
    requests = []
    for row in range(len(conditions.codes)):
        if conditions.features is None or conditions.mask is None:
            condition: np.ndarray | int = int(conditions.labels[row])
        else:
            condition = conditions.features[row, conditions.mask[row]].numpy()
        requests.append(Request(f"image-{row}", "", (), sampling, seed, condition=condition))
    return torch.tensor([done.token_ids for done in decode(LlamaGenTarget(gpt), requests)])


@torch.no_grad()
def measure_images(role: str, gpt: Gpt, gallery: Gallery, reader: Reader, vq: Vq, seed: int) -> dict[str, float]:
    """Measure a GPT on held-out codes, and its images, greedy and at temperature 1, with and without guidance."""
    losses, tops = [], []
    for rows in torch.arange(len(gallery.images)).split(BATCH):
        batch = pick(gallery.codes, rows)
        logits = code_logits(gpt, batch, torch.zeros(len(rows), dtype=torch.bool)).flatten(0, 1)
        losses.append(cross_entropy(logits, batch.codes.flatten(), reduction="none"))
        tops.append(logits.softmax(-1).topk(10).values)
    # Probabilities of the ten likeliest codes.
    top = torch.cat(tops)
    found = {"loss": float(torch.cat(losses).mean())}
    found |= {"top1_mass": float(top[:, 0].mean()), "top10_mass": float(top.sum(-1).mean())}
    half = len(gallery.images) // 2
    true = image_features(reader, gallery.images)[half:]
    settings = itertools.product((("free", 1.0), ("guided", GUIDANCE[gpt.shape.condition])), (0, 1))
    for (name, guidance), temperature in settings:
        sampling = Sampling(gpt.shape.num_image_tokens, float(temperature), guidance_scale=guidance)
        images = draw_images(vq, draw_codes(gpt, gallery.codes, sampling, seed), gpt.shape.grid)
        seen, key = gallery.read(reader, images), f"{name}_t{temperature}"
        found |= {f"{key}_whole": seen.whole, f"{key}_attributes": seen.attributes}
        found[f"{key}_frechet"] = frechet_distance(image_features(reader, images)[:half], true)
    return {f"{role}_{key}": value for key, value in found.items()}


def measure(folder: Path = CHECKPOINTS, num: int = 100, seed: int = 0) -> dict[str, float]:
    """Measure saved image models on held-out scenes; return the contents of zoo/synthesis_quality.json."""
    reader = load_reader()
    vq = load_vq(CheckpointRef(str(folder / "image_vq")), "float32", CPU)
    galleries = {kind: Gallery(kind, num, seed, folder, vq) for kind in ("text", "class")}
    found: dict[str, float] = {"num_images": num, **measure_codes(galleries["text"], reader, vq)}
    found["class_truth_whole"] = galleries["class"].read(reader, galleries["class"].images).whole
    for role in ROLES:
        gpt = load_gpt(CheckpointRef(str(folder / f"image_{role}")), "float32", CPU)
        found |= measure_images(role, gpt, galleries[gpt.shape.condition], reader, vq, seed)
        report(f"{role}: measured")
    return found
