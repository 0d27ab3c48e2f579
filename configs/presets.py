"""Maps names of presets, which the demo, benchmarks and tests use, to a job file with overrides."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
JOBS = FOLDER / "jobs"
METHODS = FOLDER / "methods"

_ZOO_CAPTION = (
    *("lvspec", "lvspec_tree", "random", "typical", "specvlm", "specvlm_uniform"),
    *("sage", "sage_expansion", "sage_node", "sage_online", "sd_chain", "sd_chain_caption", "sd_chain_long"),
    *("sd_chain_pooled", "sd_chain_pruned", "sd_chain_text", "sd_tree", "tabed_m_tree", "tabed_m_tree3"),
    *("tabed_mt", "tabed_mt_tree", "tabed_mt_tree3", "tabed_t_tree", "tabed_t_tree3"),
)
_METHODS = {f"zoo_{name}": ("zoo_caption", name) for name in _ZOO_CAPTION} | {
    "zoo_fly": ("zoo_caption", "fly_zoo"),
    "zoo_fly_gate": ("zoo_caption", "fly_gate_zoo"),
    "zoo_images_class_lantern": ("zoo_images_class", "lantern_zoo"),
    "zoo_images_class_lantern_coupled": ("zoo_images_class", "lantern_coupled_zoo"),
    "zoo_images_eagle2": ("zoo_images", "eagle2_images"),
    "zoo_images_lantern": ("zoo_images", "lantern_zoo"),
    "zoo_images_lantern_coupled": ("zoo_images", "lantern_coupled_zoo"),
    "zoo_images_lantern_pp": ("zoo_images", "lantern_pp"),
    "zoo_lookup": ("zoo_caption_plain", "lookup"),
    "zoo_tabed_mtcp": ("zoo_caption", "tabed_mtcp_zoo"),
    "zoo_video_lvspec": ("zoo_videos", "lvspec"),
    "zoo_video_sage": ("zoo_videos", "sage"),
    "zoo_video_sd": ("zoo_videos", "sd_chain"),
    "zoo_video_sd_pruned": ("zoo_videos", "sd_chain_pruned"),
    "zoo_video_specvlm": ("zoo_videos", "specvlm"),
    "demo_controller": ("zoo_caption", "sd_chain_measured"),
    "caption_llava15_tabed_mtcp": ("caption_llava15_tabed", "tabed_mtcp"),
    "caption_llava_ov_specvlm": ("caption_llava_ov_72b", "specvlm"),
    "caption_qwen25vl_fly": ("caption_qwen25vl_32b", "fly"),
    "caption_qwen25vl_fly_gate": ("caption_qwen25vl_32b", "fly_gate"),
    "caption_qwen25vl_lvspec_tree": ("caption_qwen25vl_32b", "lvspec_tree"),
    "synthesize_llamagen_lantern_coupled": ("synthesize_llamagen_lantern", "lantern_coupled"),
}
"""Job file and method of each preset, which writes to `out/NAME`."""
PRESETS: dict[str, tuple[str, ...]] = {
    "zoo_eagle2": ("zoo_caption_eagle2",),
    "zoo_medusa": ("zoo_caption_medusa",),
    "zoo_plain": ("zoo_caption_plain",),
    "zoo_rejection": ("zoo_caption", "method=rejection", "sampling.temperature=1.0", "sink.path=out/zoo_rejection"),
    "zoo_video_plain": ("zoo_videos_plain",),
    **{name: (job, f"method={method}", f"sink.path=out/{name}") for name, (job, method) in _METHODS.items()},
}
"""The stem of each preset's job file, and its overrides."""


def preset(name: str) -> tuple[Path, tuple[str, ...]]:
    """Return the job file and the overrides of a preset; a job file's stem is a preset without overrides. Raises
    KeyError if no preset or job file has this name."""
    job, *overrides = PRESETS.get(name, (name,))
    if not (JOBS / f"{job}.yaml").is_file():
        raise KeyError(name)
    return JOBS / f"{job}.yaml", tuple(overrides)
