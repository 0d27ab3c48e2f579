"""Loads the image models of one kind of condition, the prompts, and the real images for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actors.loading.method import build_method
from benchmarks.harness.engines import run_requests
from benchmarks.lantern.quality import Judge, Score, ZooJudge, count_class, count_prompt
from configs.method import Method as MethodChoice
from decoding import Completion, Engine, Request, Sampling
from decoding.contracts import Method
from models.contract import Condition
from models.heads.eagle import EagleNetwork
from models.heads.medusa import MedusaHeads, load_medusa
from models.llamagen.checkpoints import load_gpt, revision_of
from models.llamagen.condition import T5Condition, load_t5
from models.llamagen.eagle import load_image_eagle
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
class OtherDrafter:
    """A drafter besides the EAGLE head, and its revision."""

    model: LlamaGenTarget | MedusaHeads
    revision: str


@dataclass(frozen=True)
class World:
    """Models of one kind of condition. `real` has an image of each of the `prompts`; `reference` has other real images.

    `sampling` has the guidance and filters of all rows; `others` are further drafters by the method's `drafter.kind`.
    """

    kind: str
    target: LlamaGenTarget
    drafter: EagleNetwork | None
    vq: Vq
    prompts: list[ImagePrompt]
    real: Pictures
    reference: Pictures
    judge: Judge
    sampling: Sampling
    revisions: dict[str, str]
    drafter_revision: str = ""
    others: dict[str, OtherDrafter] = field(default_factory=dict)

    def revision(self, drafter: str) -> str | None:
        """Return the revision of a drafter by the method's `drafter.kind`; None if there is none."""
        if drafter == "eagle":
            return self.drafter_revision if self.drafter is not None else None
        return self.others[drafter].revision if drafter in self.others else None

    def share(self, k: int) -> int:
        """Scale the paper's `k` of 16,384 codes to the same share of this codebook."""
        return max(1, round(k * self.target.vocab_size / PAPER_CODES))

    def requests(self, temperature: float, seed: int, count: int | None = None) -> list[Request]:
        """Return the requests for the first `count` images."""
        sampling = replace(self.sampling, temperature=temperature)
        return [Request(a.sample_id, a.prompt, (), sampling, seed, condition=a.condition) for a in self.prompts[:count]]

    def build(self, choice: MethodChoice) -> Method:
        """Build a configured method; each engine needs its own."""
        kind = choice.drafter.kind
        drafter = self.others[kind].model if kind in self.others else self.drafter
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
        return [image for part in square.split(SLOTS) for image in images_of(self.vq.decode(part))]

    def encode(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.int32]:
        """Encode images to codes (n, grid²)."""
        codes = [self.vq.encode(part) for part in pixels_of(list(images)).split(SLOTS)]
        return torch.cat(codes).flatten(1).numpy().astype(np.int32)


def codes_of(done: Sequence[Completion]) -> NDArray[np.int32]:
    """Return the codes (n, grid²) of completions."""
    return np.array([completion.token_ids for completion in done], dtype=np.int32)


NAMES = {
    "text": {"target": "image_target", "vq": "image_vq", "condition": "image_t5"},
    "class": {"target": "image_class_target", "vq": "image_vq"},
}
DRAFTERS = {"text": "image_eagle", "class": "image_class_eagle"}
OTHERS: dict[str, dict[str, str]] = {"text": {"model": "image_drafter", "medusa": "image_medusa"}, "class": {}}
TOP_K = {"text": 1000, "class": 0}
"""The paper's top-k, relative to its own codebook (0: off)."""


def missing_checkpoints(kind: str, folder: Path = CHECKPOINTS) -> list[str]:
    return [name for name in (*NAMES[kind].values(), DRAFTERS[kind]) if not (folder / name).is_dir()]


def load_world(kind: str, num_images: int, seed: int, folder: Path = CHECKPOINTS) -> World:
    """Load the zoo's models of a kind, in float32 on the CPU; for classes, `num_images` is rounded up to a multiple."""
    refs = {role: CheckpointRef(str(folder / name)) for role, name in NAMES[kind].items()}
    gpt = load_gpt(refs["target"], "float32", _CPU)
    text_encoder = load_t5(refs["condition"], gpt.shape, "float32", _CPU) if kind == "text" else None
    drafter, own = CheckpointRef(str(folder / DRAFTERS[kind])), None
    if (folder / DRAFTERS[kind]).is_dir():
        own = load_image_eagle(drafter, gpt.shape, "float32", _CPU)
    vq = load_vq(refs["vq"], "float32", _CPU)
    judge = ZooJudge(load_reader(folder))
    make = _text_prompts if kind == "text" else _class_prompts
    prompts, real = make(num_images, seed, text_encoder)
    top_k = TOP_K[kind] * gpt.shape.vocab_size // PAPER_CODES
    sampling = Sampling(gpt.shape.num_image_tokens, top_k=top_k, guidance_scale=GUIDANCE[kind])
    return World(
        kind=kind,
        target=LlamaGenTarget(gpt, name=NAMES[kind]["target"]),
        drafter=own,
        vq=vq,
        prompts=prompts,
        real=real,
        reference=[render_grainy(scene) for scene in _draw_scenes(kind, NUM_REFERENCE, num_images)],
        judge=judge,
        sampling=sampling,
        revisions={role: revision_of(ref) for role, ref in refs.items()},
        drafter_revision=revision_of(drafter) if own is not None else "",
        others={
            name: _load_other(name, CheckpointRef(str(folder / place)))
            for name, place in OTHERS[kind].items()
            if (folder / place).is_dir()
        },
    )


def _load_other(kind: str, ref: CheckpointRef) -> OtherDrafter:
    if kind == "medusa":
        return OtherDrafter(load_medusa(ref, "float32", _CPU), revision_of(ref))
    gpt = load_gpt(ref, "float32", _CPU)
    return OtherDrafter(LlamaGenTarget(gpt, name=Path(ref.path).name), revision_of(ref))


def _text_prompts(num: int, seed: int, text_encoder: T5Condition | None) -> tuple[list[ImagePrompt], Pictures]:
    assert text_encoder is not None
    prompts, real = [], []
    with torch.inference_mode():
        for index, (_, pixels, prompt) in enumerate(sample_grainy("held_out", num, seed)):
            features = text_encoder.encode(prompt).float().numpy()
            prompts.append(ImagePrompt(f"text-{index}", prompt, features, count_prompt(prompt)))
            real.append(pixels)
    return prompts, real


def _class_prompts(num: int, seed: int, _: T5Condition | None) -> tuple[list[ImagePrompt], Pictures]:
    """Return prompts with labels in turn, and real images of the same labels."""
    num = -(-num // NUM_CLASSES) * NUM_CLASSES
    found: dict[int, list[Scene]] = {label: [] for label in range(NUM_CLASSES)}
    draw, index = _drawer("class"), seed * 100_000
    while min(len(scenes) for scenes in found.values()) < num // NUM_CLASSES:
        scene = draw(index)
        found[class_of(scene)].append(scene)
        index += 1
    prompts, real = [], []
    for index in range(num):
        turn, label = divmod(index, NUM_CLASSES)
        colour, shape = COLOURS[label // len(SHAPES)], SHAPES[label % len(SHAPES)]
        prompts.append(ImagePrompt(f"class-{index}", f"{colour} {shape}", label, count_class(colour, shape)))
        real.append(render_grainy(found[label][turn]))
    return prompts, real


def _drawer(kind: str) -> Callable[[int], Scene]:
    # Some classes have no held-out scene: a class-conditional model is compared with scenes of its training split, as
    # published models are; the zoo's training does not use these scenes.
    split, only = ("held_out", None) if kind == "text" else ("train", 1)
    return lambda index: draw_grainy_scene(scene_rng(f"grain/{split}", REAL_SEED, index), split, only)


def _draw_scenes(kind: str, num: int, start: int) -> list[Scene]:
    draw = _drawer(kind)
    return [draw(5_000_000 + start + index) for index in range(num)]
