"""The methods, drafters and scenes of the benchmark on the vision pair."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.methods.scenarios import Case
from configs.load import load_job
from configs.schema import CaptionJobConfig
from zoo.real_vision.model import IMAGE_PX, NUM_VISUAL_TOKENS, SYSTEM
from zoo.samples import render_like_a_file
from zoo.world.dense import PROMPTS, draw_asked, write_description
from zoo.world.grammar import count_stated
from zoo.world.render import render_scene
from zoo.world.scene import scene_rng

CONFIG = "configs/jobs/real_vision.yaml"
FOLDER = Path("out/real_vision")
DRAFTERS = {name: FOLDER / f"{name}_drafter" for name in ("strong", "weak")}
SEED = 41
NUM_CASES = {"dense": 36, "clip": 30}
"""Scenario → number of held-out scenes: one image each, or a clip of `CLIP_FRAMES` frames."""
CLIP_FRAMES = 8
MAX_CONTEXT_TOKENS = {"dense": 768, "clip": 384 + CLIP_FRAMES * (NUM_VISUAL_TOKENS + 2)}
SLOTS = {"dense": 32, "clip": 10}
HALF = "{kind: pruned, ratio: 0.5%s}"
WEAK_LVSPEC = ("method.acceptance.loose=0.3", "method.acceptance.top_visual=5")
"""λ and N for a weak drafter (LVSpec, Appendix D)."""
OVERVIEW = (
    f"<|im_start|>system\\n{SYSTEM}<|im_end|>\\n<|im_start|>user\\n<image>\\n{PROMPTS['overview']}<|im_end|>\\n"
    "<|im_start|>assistant\\n"
)
CAPTION = (
    f"{{kind: caption, path: {DRAFTERS['weak']}, dtype: float32, device: cpu, num_beams: 1, max_new_tokens: 240, "
    f'prompt: "{OVERVIEW}"}}'
)
"""Context C: captions that the weak drafter writes when it is asked for an overview."""


@dataclass(frozen=True)
class Setting:
    """A method as a preset or a section, with a drafter of DRAFTERS or none, other overrides of the job, and whether
    drafts are accepted without the target's verdict."""

    method: str
    drafter: str | None = None
    overrides: tuple[str, ...] = ()
    follow_drafter: bool = False


def settings(scenario: str = "dense") -> dict[str, Setting]:
    """Return the measured settings of a scenario by name, plain decoding of each temperature before the others."""
    return _of_images() if scenario == "dense" else _of_clips()


def _of_images() -> dict[str, Setting]:
    hot = ("sampling.temperature=1",)
    by_name = {"plain": Setting("plain"), "plain_sampled": Setting("plain", None, hot)}
    by_name |= {name: Setting(name) for name in ("lookup", "suffix", "jacobi")}
    by_name["layer_skip"] = Setting(
        "{drafter: {kind: layer_skip, layers: [0, 1, 2, 3, 4, 5, 7, 10, 13, 16, 19, 22, 24, 25, 26, 27, 28, 29]}, "
        "tree: {kind: chain, length: 3}}"
    )
    both = (
        *("sd_chain", "sd_chain_text", "tabed_mt", "sd_tree", "specvlm", "specvlm_uniform", "sage"),
        *("sd_chain_pruned", "lvspec"),
    )
    trees = [f"tabed_{contexts}_tree{width}" for width in ("", "3") for contexts in ("m", "t", "mt")]
    strong = ("sd_chain_pooled", "random", "typical", "sage_expansion", "sage_online")
    by_name |= {f"{name}/strong": Setting(name, "strong") for name in both}
    by_name |= {f"{name}/weak": Setting(name, "weak") for name in both}
    by_name["lvspec/weak"] = Setting("lvspec", "weak", WEAK_LVSPEC)
    by_name |= {f"{name}/strong": Setting(name, "strong") for name in strong}
    captioned = {
        "sd_chain_caption": (f"method.contexts=[{CAPTION}]",),
        "tabed_mtcp": (f"method.contexts=[{{kind: full}}, {{kind: text_only}}, {CAPTION}, {{kind: pooled}}]",),
    }
    by_name |= {f"{name}/strong": Setting(name, "strong", given) for name, given in captioned.items()}
    by_name |= {f"{name}_sampled/strong": Setting(name, "strong", hot) for name in ("sd_chain", "sd_tree")}
    by_name["rejection/strong"] = Setting("rejection", "strong", hot)
    by_name["pruned_drafter_alone/strong"] = Setting("lvspec", "strong", follow_drafter=True)
    for name, guidance in (("specvlm", ", guidance: attention"), ("specvlm_uniform", "")):
        half = (f"method.contexts=[{HALF % guidance}]",)
        by_name[f"{name}_50/strong"] = Setting(name, "strong", half)
    variants = {"before": "relevance_of=before", "no_shift": "position_shift=false"}
    for name, changed in variants.items():
        by_name[f"lvspec_{name}/strong"] = Setting("lvspec", "strong", (f"method.acceptance.{changed}",))
    by_name |= {f"{name}/strong": Setting(name, "strong") for name in trees}
    return by_name


def _of_clips() -> dict[str, Setting]:
    by_name = {name: Setting(name) for name in ("plain", "suffix")}
    both = ("sd_chain", "sd_tree", "specvlm", "specvlm_uniform")
    strong = (*both, "sd_chain_text", "tabed_mt", "sd_chain_pooled", "sd_chain_pruned", "lvspec", "sage", "random")
    by_name |= {f"{name}/strong": Setting(name, "strong") for name in strong}
    by_name["pruned_drafter_alone/strong"] = Setting("lvspec", "strong", follow_drafter=True)
    by_name |= {f"{name}/weak": Setting(name, "weak") for name in both}
    return by_name


def job_of(setting: Setting, dtype: str, device: str = "cpu") -> CaptionJobConfig:
    """Return the caption job of a setting."""
    overrides = [f"method={setting.method}", f"model.target.dtype={dtype}", f"model.target.device={device}"]
    if setting.drafter is not None:
        overrides.append(f"model.drafter={{path: {DRAFTERS[setting.drafter]}, dtype: {dtype}, device: {device}}}")
    return load_job(CaptionJobConfig, CONFIG, (*overrides, *setting.overrides))


def build_cases(scenario: str, num_cases: int) -> list[Case]:
    """Return held-out scenes, each with a phrasing in turn, scored by the attributes that the true caption states.

    A clip shows one still scene: its frames differ by the artefacts of scaling and compression.
    """
    cases = []
    for index, (scene, phrasing) in enumerate(draw_asked("held_out", num_cases, SEED)):
        truth = write_description(scene, phrasing, scene_rng("held_out", SEED, index))
        frames: tuple[NDArray[np.uint8], ...] = (np.asarray(render_scene(scene, IMAGE_PX)),)
        if scenario == "clip":
            rng = scene_rng("held_out", SEED + 1, index)
            frames = tuple(render_like_a_file(scene, rng, IMAGE_PX) for _ in range(CLIP_FRAMES))
        content = [{"type": "image"}] * len(frames) + [{"type": "text", "text": PROMPTS[phrasing]}]
        score = functools.partial(count_stated, truth)
        cases.append(Case(f"{scenario}-{index}", ({"role": "user", "content": content},), frames, score, truth))
    return cases
