"""Maps names of presets to a job file with overrides; most presets replace one job file of an earlier version."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
JOBS = FOLDER / "jobs"
METHODS = FOLDER / "methods"
CAPTIONS = "sink.path=s3://my-bucket/captions"
IMAGES = "sink.path=s3://my-bucket/images/lantern"


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
_ZOO = {name: ("zoo_caption", name) for name in _SAME_NAME} | {
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
    "video_jacobi": ("zoo_videos_plain", "jacobi"),
    "video_lvspec": ("zoo_videos", "lvspec"),
    "video_sage": ("zoo_videos", "sage"),
    "video_sd": ("zoo_videos", "sd_chain"),
    "video_sd_pruned": ("zoo_videos", "sd_chain_pruned"),
    "video_specvlm": ("zoo_videos", "specvlm"),
    "video_suffix": ("zoo_videos_plain", "suffix"),
}
"""Job file and method of each preset `zoo_NAME`, which writes to `out/zoo_NAME`."""

PRESETS: dict[str, tuple[str, ...]] = {
    "caption_llava15_tabed_mtcp": ("caption_llava15_tabed", "method=tabed_mtcp", f"{CAPTIONS}/tabed_mtcp"),
    "caption_llava_ov_sage": ("caption_llava_ov_72b",),
    "caption_llava_ov_specvlm": ("caption_llava_ov_72b", "method=specvlm", f"{CAPTIONS}/ov_specvlm"),
    "caption_qwen25vl_fly": ("caption_qwen25vl_32b", "method=fly", f"{CAPTIONS}/fly"),
    "caption_qwen25vl_fly_gate": ("caption_qwen25vl_32b", "method=fly_gate", f"{CAPTIONS}/fly_gate"),
    "caption_qwen25vl_lvspec": ("caption_qwen25vl_32b",),
    "caption_qwen25vl_lvspec_tree": ("caption_qwen25vl_32b", "method=lvspec_tree", f"{CAPTIONS}/lvspec_tree"),
    "demo_controller": ("zoo_caption", "method=sd_chain_measured", "sink.path=out/controller"),
    "synthesize_llamagen_lantern_coupled": (
        "synthesize_llamagen_lantern",
        "method=lantern_coupled",
        f"{IMAGES}_coupled",
    ),
    "zoo_eagle2": ("zoo_caption_eagle2",),
    "zoo_medusa": ("zoo_caption_medusa",),
    "zoo_plain": ("zoo_caption_plain",),
    "zoo_rejection": ("zoo_caption", "method=rejection", "sampling.temperature=1.0", "sink.path=out/zoo_rejection"),
    "zoo_video_plain": ("zoo_videos_plain",),
    **{f"zoo_{name}": (job, f"method={method}", f"sink.path=out/zoo_{name}") for name, (job, method) in _ZOO.items()},
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
