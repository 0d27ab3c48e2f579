"""Loads the image models of one kind of condition, the prompts, and the real images for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actors.loading.method import build_method
from benchmarks.harness.engines import run_requests
from benchmarks.lantern.quality import Judge, Score, count_class, count_prompt
from configs.method import MethodConfig
from decoding import Completion, Engine, Request, Sampling
from decoding.contracts import Method
from models.contract import Condition
from models.heads.eagle import EagleNetwork
from models.heads.eagle3 import Eagle3Network
from models.heads.formats import FORMATS
from models.heads.loader import load_head
from models.heads.medusa import MedusaHeads
from models.llamagen.checkpoints import load_gpt, revision_of
from models.llamagen.condition import T5Condition, load_t5
from models.llamagen.eagle import image_head
from models.llamagen.gpt import Gpt
from models.llamagen.target import LlamaGenTarget
from models.llamagen.vq import Vq
from models.llamagen.vq_files import load_vq
from models.loading.checkpoints import CheckpointRef
from zoo.image.gpt import NUM_CLASSES, class_of
from zoo.image.quality import GUIDANCE, load_reader
from zoo.image.vq import images_of, pixels_of
from zoo.pair import CHECKPOINTS
from zoo.world.grain import draw_grainy_scene, render_grainy, sample_grainy
from zoo.world.scene import COLOURS, SHAPES, Scene, scene_rng

Pictures = list[NDArray[np.uint8]]
Drafter = Eagle3Network | EagleNetwork | LlamaGenTarget | MedusaHeads
KINDS = ("text", "class")
SLOTS = 48
NUM_REFERENCE = 512
"""Number of reference images of all Fréchet distances."""
REAL_SEED = 977
"""A seed that is not used in the zoo's training."""
PAPER_CODES = 16384
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ImagePrompt:
    """One image to synthesise: prompt, condition, and the function that scores the contents of the image."""

    sample_id: str
    prompt: str
    condition: Condition
    score: Score


@dataclass(frozen=True)
class World:
    """Models of one kind of condition. `real` has an image of each of the `prompts`; `reference` has other real images.

    `sampling` has the guidance and filters of all rows; `drafters` has the model and the revision of every drafter that
    exists, by the method's `drafter.kind`.
    """

    kind: str
    target: LlamaGenTarget
    vq: Vq
    prompts: list[ImagePrompt]
    real: Pictures
    reference: Pictures
    judge: Judge
    sampling: Sampling
    revisions: dict[str, str]
    drafters: dict[str, tuple[Drafter, str]]

    def share(self, k: int) -> int:
        """Return the number of neighbours that is the same share of this codebook as `k` is of the paper's 16,384
        codes; at least 1."""
        return max(1, round(k * self.target.vocab_size / PAPER_CODES))

    def requests(self, temperature: float, seed: int, count: int | None = None) -> list[Request]:
        """Return the requests for the first `count` images."""
        sampling = replace(self.sampling, temperature=temperature)
        return [Request(a.sample_id, a.prompt, (), sampling, seed, condition=a.condition) for a in self.prompts[:count]]

    def build(self, choice: MethodConfig) -> Method:
        """Build a configured method; each engine needs its own."""
        drafter, _ = self.drafters.get(choice.drafter.kind, (None, ""))
        return build_method(choice, drafter, self.target, self.vq.codebook)

    def decode(self, method: Method, requests: Sequence[Request]) -> list[Completion]:
        """Return all completions in the order of `requests`; raise RuntimeError if one failed."""
        shape = self.target.gpt.shape
        engine = Engine(self.target, method, SLOTS, shape.num_condition_tokens + shape.num_image_tokens)
        return run_requests(engine, requests)

    def paint(self, codes: NDArray[np.int32]) -> Pictures:
        """Decode codes (n, grid²) to images."""
        grid = self.target.gpt.shape.grid
        square = torch.from_numpy(codes.astype(np.int64)).reshape(-1, grid, grid)
        return [image for part in torch.split(square, SLOTS) for image in images_of(self.vq.decode(part))]

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.int32]:
        """Encode images to codes (n, grid²)."""
        codes = [self.vq.encode(part) for part in torch.split(pixels_of(list(images)), SLOTS)]
        return torch.cat(codes).flatten(1).numpy().astype(np.int32)


def codes_of(done: Sequence[Completion]) -> NDArray[np.int32]:
    """Return the codes (n, grid²) of completions."""
    return np.array([completion.token_ids for completion in done], dtype=np.int32)


NAMES = {
    "text": {"target": "image_target", "vq": "image_vq", "condition": "image_t5"},
    "class": {"target": "image_class_target", "vq": "image_vq"},
}
DRAFTERS = {
    "text": {
        "eagle": CHECKPOINTS / "image_eagle",
        "eagle3": Path("out/zoo_image_eagle3"),  # does not ship; zoo/README.md trains it
        "model": CHECKPOINTS / "image_drafter",
        "medusa": CHECKPOINTS / "image_medusa",
    },
    "class": {"eagle": CHECKPOINTS / "image_class_eagle"},
}
TOP_K = {"text": 1000, "class": 0}
"""The paper's top-k, relative to its own codebook (0: off)."""


def load_world(kind: str, num_images: int, seed: int) -> World:
    """Load the zoo's models of a kind, in float32 on the CPU; for classes, `num_images` is rounded up to a multiple.

    Drafters without a checkpoint are left out.
    """
    refs = {role: CheckpointRef(str(CHECKPOINTS / name)) for role, name in NAMES[kind].items()}
    gpt = load_gpt(refs["target"], "float32", _CPU)
    if kind == "text":
        prompts, real = _text_prompts(num_images, seed, load_t5(refs["condition"], gpt.shape, "float32", _CPU))
    else:
        prompts, real = _class_prompts(num_images, seed)
    top_k = TOP_K[kind] * gpt.shape.vocab_size // PAPER_CODES
    return World(
        kind=kind,
        target=LlamaGenTarget(gpt, name=NAMES[kind]["target"]),
        vq=load_vq(refs["vq"], "float32", _CPU),
        prompts=prompts,
        real=real,
        reference=[render_grainy(_draw_scene(kind, 5_000_000 + num_images + index)) for index in range(NUM_REFERENCE)],
        judge=Judge(load_reader(CHECKPOINTS)),
        sampling=Sampling(gpt.shape.num_image_tokens, top_k=top_k, guidance_scale=GUIDANCE[kind]),
        revisions={role: revision_of(ref) for role, ref in refs.items()},
        drafters={
            drafter: _load_drafter(drafter, folder, gpt)
            for drafter, folder in DRAFTERS[kind].items()
            if folder.is_dir()
        },
    )


def _load_drafter(kind: str, folder: Path, gpt: Gpt) -> tuple[Drafter, str]:
    ref = CheckpointRef(str(folder))
    if kind in FORMATS:
        head, embedding = image_head(FORMATS[kind], gpt.shape), gpt.embed_tokens.weight
        model: Drafter = load_head(head, ref, "float32", _CPU, gpt.shape.num_layers, embedding)
    else:
        model = LlamaGenTarget(load_gpt(ref, "float32", _CPU), name=folder.name)
    return model, revision_of(ref)


def _text_prompts(num: int, seed: int, text_encoder: T5Condition) -> tuple[list[ImagePrompt], Pictures]:
    prompts, real = [], []
    with torch.inference_mode():
        for index, (_, pixels, prompt) in enumerate(sample_grainy("held_out", num, seed)):
            features = text_encoder.encode(prompt).float().numpy()
            prompts.append(ImagePrompt(f"text-{index}", prompt, features, count_prompt(prompt)))
            real.append(pixels)
    return prompts, real


def _class_prompts(num: int, seed: int) -> tuple[list[ImagePrompt], Pictures]:
    """Return prompts with labels in turn, and real images of the same labels."""
    per_class = -(-num // NUM_CLASSES)
    scenes: dict[int, list[Scene]] = {label: [] for label in range(NUM_CLASSES)}
    index = seed * 100_000
    while min(map(len, scenes.values())) < per_class:
        scene = _draw_scene("class", index)
        scenes[class_of(scene)].append(scene)
        index += 1
    prompts, real = [], []
    for index in range(per_class * NUM_CLASSES):
        turn, label = divmod(index, NUM_CLASSES)
        colour, shape = COLOURS[label // len(SHAPES)], SHAPES[label % len(SHAPES)]
        prompts.append(ImagePrompt(f"class-{index}", f"{colour} {shape}", label, count_class(colour, shape)))
        real.append(render_grainy(scenes[label][turn]))
    return prompts, real


def _draw_scene(kind: str, index: int) -> Scene:
    # Some classes have no held-out scene: a class-conditional model is compared with scenes of its training split, as
    # published models are; the zoo's training does not use these scenes.
    split, only = ("held_out", None) if kind == "text" else ("train", 1)
    return draw_grainy_scene(scene_rng(f"grain/{split}", REAL_SEED, index), split, only)
