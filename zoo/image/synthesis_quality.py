"""Measures the image models: attributes that a captioner finds in their images, their codes, and their entropy."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.llamagen.checkpoints import load_gpt
from models.llamagen.gpt import Gpt
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from zoo.image.gpt import Codes, code_logits, draw_scenes, encode_scenes, pick, sample_codes
from zoo.image.quality import (
    Described,
    Reader,
    frechet_distance,
    image_features,
    load_reader,
    measure_class,
    measure_described,
)
from zoo.image.text import load_t5
from zoo.image.vq import draw_images
from zoo.pair import CHECKPOINTS
from zoo.scoring import markdown_table, value_table
from zoo.training import report
from zoo.world.grain import render_grainy, write_prompt

QUALITY_JSON = Path(__file__).parents[1] / "synthesis_quality.json"
CPU = torch.device("cpu")
# The guidance scale, of 1 to 6, at which a model's images fit their prompts best.
GUIDANCE = {"text": 2.0, "class": 2.0}
ROLES = ("target", "drafter", "class_target")
BATCH = 50


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

    def batches(self) -> list[Codes]:
        """Return the codes in parts of at most `BATCH` images."""
        return [pick(self.codes, rows) for rows in torch.arange(len(self.images)).split(BATCH)]


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


def measure_mass(prefix: str, top: Tensor) -> dict[str, float]:
    """Return the mean probability of the likeliest code and of the ten likeliest, from probabilities [n, 10]."""
    return {f"{prefix}top1_mass": float(top[:, 0].mean()), f"{prefix}top10_mass": float(top.sum(-1).mean())}


@torch.no_grad()
def measure_images(role: str, gpt: Gpt, gallery: Gallery, reader: Reader, vq: Vq, seed: int) -> dict[str, float]:
    """Measure a GPT on held-out codes (teacher-forced), and its images, greedy and at temperature 1, with and without
    guidance."""
    losses, tops = [], []
    for batch in gallery.batches():
        logits = code_logits(gpt, batch, torch.zeros(len(batch.codes), dtype=torch.bool)).flatten(0, 1)
        losses.append(cross_entropy(logits, batch.codes.flatten(), reduction="none"))
        tops.append(logits.softmax(-1).topk(10).values)
    found = {"loss": float(torch.cat(losses).mean()), **measure_mass("", torch.cat(tops))}
    half = len(gallery.images) // 2
    true = image_features(reader, gallery.images)[half:]
    settings = itertools.product((("free", 1.0), ("guided", GUIDANCE[gpt.shape.condition])), (0, 1))
    for (name, guidance), temperature in settings:
        mass: list[Tensor] = []
        images: list[np.ndarray] = []
        for number, batch in enumerate(gallery.batches()):
            codes = sample_codes(gpt, batch, seed + number, guidance, float(temperature), mass=mass)
            images += draw_images(vq, codes, gpt.shape.grid)
        seen, key = gallery.read(reader, images), f"{name}_t{temperature}"
        found |= {f"{key}_whole": seen.whole, f"{key}_attributes": seen.attributes}
        found[f"{key}_frechet"] = frechet_distance(image_features(reader, images)[:half], true)
        found |= measure_mass(f"{key}_", torch.cat(mass))
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


def quality_table(measured: dict[str, float]) -> str:
    """Render the measured numbers as two Markdown tables: the VQ model's, then one column per GPT."""
    rows = (
        ("original pictures described as their prompts say", "truth_whole"),
        ("reconstructions described so", "reconstruction_whole"),
        ("their attributes", "reconstruction_attributes"),
        ("reconstructions' peak signal to noise, dB", "reconstruction_psnr_db"),
        ("codes used", "codes_used_share"),
        ("codes' perplexity", "codes_perplexity"),
        ("Fréchet distance of original pictures to others", "truth_frechet"),
        ("Fréchet distance of reconstructions to others", "reconstruction_frechet"),
    )
    codes = value_table("VQ model, on held-out scenes", rows, measured)
    per_gpt = [("loss per code, nats", "loss")]
    per_gpt += [(f"mass of the top {n} of held-out codes", f"top{n}_mass") for n in (1, 10)]
    for (name, title), temperature in itertools.product((("free", "no guidance"), ("guided", "guided")), (0, 1)):
        key = f"{name}_t{temperature}"
        per_gpt += [
            (f"{title}, temperature {temperature}: described as asked", f"{key}_whole"),
            ("… attributes", f"{key}_attributes"),
            ("… Fréchet distance to pictures", f"{key}_frechet"),
        ]
        if temperature == 1:
            per_gpt += [(f"… mass of the top {n}", f"{key}_top{n}_mass") for n in (1, 10)]
    values = [(name, *(f"{measured[f'{role}_{key}']:.3f}" for role in ROLES)) for name, key in per_gpt]
    gpts = markdown_table(("GPTs, on held-out scenes", *(f"`image_{role}`" for role in ROLES)), values)
    return f"{codes}\n\n{gpts}"
