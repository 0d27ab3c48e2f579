"""Finds presets and named methods.

A preset is a job file with overrides; most of them replace one job file of an earlier version. `method: sage` is
replaced by the `method` section of `configs/methods/sage.yaml`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from configs.yaml_file import ConfigError, read_yaml

FOLDER = Path(__file__).parent
JOBS = FOLDER / "jobs"
METHODS = FOLDER / "methods"
CAPTIONS = "sink.path=s3://my-bucket/captions"
IMAGES = "sink.path=s3://my-bucket/images/lantern"
_NEXT = "model.target.path=llava-hf/llava-v1.6-vicuna"
_160M = ("model.drafter.path=mjbooo/lvlm160m-bf16", "model.drafter.dtype=bfloat16")


_SAME_NAME = (
    *("lvspec", "lvspec_tree", "random", "typical", "specvlm", "specvlm_uniform"),
    *("sage", "sage_expansion", "sage_node", "sage_online"),
    *(
        "sd_chain",
        "sd_chain_caption",
        "sd_chain_long",
        "sd_chain_pooled",
        "sd_chain_pruned",
        "sd_chain_text",
        "sd_tree",
    ),
    *("tabed_m_tree", "tabed_m_tree3", "tabed_mt", "tabed_mt_tree", "tabed_mt_tree3"),
    *("tabed_t_tree", "tabed_t_tree3"),
)
_ZOO: dict[str, tuple[str, ...]] = {name: ("zoo_caption", name) for name in _SAME_NAME} | {
    "fly": ("zoo_caption", "fly_zoo"),
    "fly_gate": ("zoo_caption", "fly_gate_zoo"),
    "images_class_lantern": ("zoo_images_class", "lantern_zoo"),
    "images_class_lantern_coupled": ("zoo_images_class", "lantern_coupled_zoo"),
    "images_eagle2": ("zoo_images", "eagle2_images"),
    "images_lantern": ("zoo_images", "lantern_zoo"),
    "images_lantern_coupled": ("zoo_images", "lantern_coupled_zoo"),
    "images_lantern_pp": ("zoo_images", "lantern_pp"),
    "layer_skip": ("zoo_caption_plain", "layer_skip_zoo"),
    "images_class_jacobi": ("zoo_images_class_plain", "jacobi_images"),
    "images_jacobi": ("zoo_images_plain", "jacobi_images"),
    "jacobi": ("zoo_caption_plain", "jacobi"),
    "lookup": ("zoo_caption_plain", "lookup"),
    "suffix": ("zoo_caption_plain", "suffix"),
    "tabed_mtcp": ("zoo_caption", "tabed_mtcp_zoo"),
    "video_block": ("zoo_videos", "block_8", "zoo/checkpoints/video_block"),
    "video_jacobi": ("zoo_videos_plain", "jacobi"),
    "video_layer_skip": ("zoo_videos_plain", "layer_skip_zoo"),
    "video_lvspec": ("zoo_videos", "lvspec"),
    "video_sage": ("zoo_videos", "sage"),
    "video_sd": ("zoo_videos", "sd_chain"),
    "video_sd_pruned": ("zoo_videos", "sd_chain_pruned"),
    "video_specvlm": ("zoo_videos", "specvlm"),
    "video_suffix": ("zoo_videos_plain", "suffix"),
}
"""Preset `zoo_NAME`, which writes to `out/zoo_NAME` → job file, method, and drafter if it is not the job file's."""

PRESETS: dict[str, tuple[str, ...]] = {
    "caption_llava15_tabed_mtcp": ("caption_llava15_tabed", "method=tabed_mtcp", f"{CAPTIONS}/tabed_mtcp"),
    "caption_llava15_13b_tabed": (
        "caption_llava15_tabed",
        "model.target.path=llava-hf/llava-1.5-13b-hf",
        f"{CAPTIONS}/llava15_13b",
    ),
    "caption_llava_next_tabed": ("caption_llava15_tabed", f"{_NEXT}-7b-hf", *_160M, f"{CAPTIONS}/next_7b"),
    "caption_llava_next_13b_tabed": ("caption_llava15_tabed", f"{_NEXT}-13b-hf", f"{CAPTIONS}/next_13b"),
    "caption_llava_ov_fly": ("caption_llava_ov_lvspec", "method=fly_zoo", f"{CAPTIONS}/ov_fly"),
    "caption_llava_ov_sage": ("caption_llava_ov_72b",),
    "caption_llava_ov_specvlm": ("caption_llava_ov_72b", "method=specvlm", f"{CAPTIONS}/ov_specvlm"),
    "caption_qwen25vl_fly": ("caption_qwen25vl_32b", "method=fly", f"{CAPTIONS}/fly"),
    "caption_qwen25vl_fly_gate": ("caption_qwen25vl_32b", "method=fly_gate", f"{CAPTIONS}/fly_gate"),
    "caption_qwen25vl_lvspec": ("caption_qwen25vl_32b",),
    "caption_qwen25vl_lvspec_tree": ("caption_qwen25vl_32b", "method=lvspec_tree", f"{CAPTIONS}/lvspec_tree"),
    "demo_controller": ("zoo_caption", "method=sd_chain_measured", "sink.path=out/controller"),
    **{
        f"synthesize_llamagen_lantern_greedy_{name}": (
            "synthesize_llamagen_lantern",
            "sampling.temperature=0.0",
            f"method.acceptance.delta={delta}",
            f"{IMAGES}_greedy_{name}",
        )
        for name, delta in (("005", 0.05), ("02", 0.2))
    },
    "synthesize_llamagen_lantern_coupled": (
        "synthesize_llamagen_lantern",
        "method=lantern_coupled",
        f"{IMAGES}_coupled",
    ),
    "zoo_block": ("zoo_caption_block",),
    "zoo_eagle2": ("zoo_caption_eagle2",),
    "zoo_eagle3": ("zoo_caption_eagle3",),
    "zoo_medusa": ("zoo_caption_medusa",),
    "zoo_plain": ("zoo_caption_plain",),
    "zoo_rejection": ("zoo_caption", "method=rejection", "sampling.temperature=1.0", "sink.path=out/zoo_rejection"),
    "zoo_video_plain": ("zoo_videos_plain",),
    **{
        f"zoo_{name}": (
            job,
            f"method={method}",
            f"sink.path=out/zoo_{name}",
            *(f"model.drafter.path={path}" for path in head),
        )
        for name, (job, method, *head) in _ZOO.items()
    },
}
"""Maps names of presets to the job file's stem and its overrides."""


def preset(name: str) -> tuple[Path, tuple[str, ...]]:
    """Return the job file and the overrides of a preset; a job file's stem is a preset without overrides.

    Raises:
        KeyError: no preset or job file has this name.
    """
    if name in PRESETS:
        job, *overrides = PRESETS[name]
        return JOBS / f"{job}.yaml", tuple(overrides)
    if not (JOBS / f"{name}.yaml").is_file():
        raise KeyError(name)
    return JOBS / f"{name}.yaml", ()


def find_job(path: str | Path) -> tuple[Path, tuple[str, ...]]:
    """Return the job file and the overrides of a preset for a name such as `demo_caption`; other paths as they are.

    A name has no `/` and no suffix `.yaml`, and no file in the working directory has it.

    Raises:
        ConfigError: no preset and no job file has this name.
    """
    name = str(path)
    if "/" in name or name.endswith((".yaml", ".yml")) or Path(name).is_file():
        return Path(name), ()
    try:
        return preset(name)
    except KeyError:
        close = difflib.get_close_matches(name, job_names(), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "the reference of presets lists the names"
        raise ConfigError(f"{name}: no file and no shipped job file has this name; {hint}") from None


def job_names() -> list[str]:
    """Return the names of all presets and shipped job files, sorted."""
    return sorted({*PRESETS, *(path.stem for path in JOBS.glob("*.yaml"))})


def resolve_methods(data: dict[str, Any], origin: str) -> None:
    """Replace the method names in `method` and in `method.auto.candidates` by their sections, in place.

    Raises:
        ConfigError: no method has this name.
    """
    if isinstance(data.get("method"), str):
        data["method"] = named_method(data["method"], f"{origin}: method")
    auto = data["method"].get("auto") if isinstance(data.get("method"), dict) else None
    candidates = auto.get("candidates") if isinstance(auto, dict) else None
    if isinstance(candidates, list):
        for index, candidate in enumerate(candidates):
            if isinstance(candidate, str):
                candidates[index] = named_method(candidate, f"{origin}: method.auto.candidates.{index}")


def method_names() -> list[str]:
    """Return the names of all methods in `configs/methods`, sorted."""
    return sorted(path.stem for path in METHODS.glob("*.yaml"))


def named_method(name: str, origin: str) -> dict[str, Any]:
    """Read the section of a named method.

    Raises:
        ConfigError: no method has this name.
    """
    names = method_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(names)}"
        raise ConfigError(f"{origin}: no method is named {name!r}; {hint}")
    section = read_yaml(METHODS / f"{name}.yaml")["method"]
    assert isinstance(section, dict)
    return section


def replacement_of(path: str | Path) -> str | None:
    """Return the command-line arguments that replace a job file of an earlier version, or None.

    Earlier job files `configs/NAME.yaml` are now `configs/jobs/NAME.yaml`; some are a shared job file with overrides.
    """
    path = Path(path)
    if path.parent.name != "configs" or path.suffix != ".yaml":
        return None
    job, *overrides = PRESETS.get(path.stem, (path.stem,))
    if not (JOBS / f"{job}.yaml").is_file():
        return None
    return " ".join([f"--config {path.parent / 'jobs' / job}.yaml", *overrides])
