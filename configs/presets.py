"""Presets: a job file with a method and overrides, by name. Most replace one file each of earlier versions."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
JOBS = FOLDER / "jobs"
METHODS = FOLDER / "methods"

PRESETS: dict[str, tuple[str, ...]] = {
    "caption_llava15_tabed_mtcp": (
        "caption_llava15_tabed",
        "method=tabed_mtcp",
        "sink.path=s3://my-bucket/captions/tabed_mtcp",
    ),
    "caption_llava_ov_sage": ("caption_llava_ov_72b",),
    "caption_llava_ov_specvlm": (
        "caption_llava_ov_72b",
        "method=specvlm",
        "sink.path=s3://my-bucket/captions/ov_specvlm",
    ),
    "caption_qwen25vl_fly": ("caption_qwen25vl_32b", "method=fly", "sink.path=s3://my-bucket/captions/fly"),
    "caption_qwen25vl_fly_gate": (
        "caption_qwen25vl_32b",
        "method=fly_gate",
        "sink.path=s3://my-bucket/captions/fly_gate",
    ),
    "caption_qwen25vl_lvspec": ("caption_qwen25vl_32b",),
    "caption_qwen25vl_lvspec_tree": (
        "caption_qwen25vl_32b",
        "method=lvspec_tree",
        "sink.path=s3://my-bucket/captions/lvspec_tree",
    ),
    "demo_controller": ("zoo_caption", "method=sd_chain_measured", "sink.path=out/controller"),
    "synthesize_llamagen_lantern_coupled": (
        "synthesize_llamagen_lantern",
        "method=lantern_coupled",
        "sink.path=s3://my-bucket/images/lantern_coupled",
    ),
    "zoo_eagle2": ("zoo_caption_eagle2",),
    "zoo_fly": ("zoo_caption", "method=fly_zoo", "sink.path=out/zoo_fly"),
    "zoo_fly_gate": ("zoo_caption", "method=fly_gate_zoo", "sink.path=out/zoo_fly_gate"),
    "zoo_images_class_lantern": ("zoo_images_class", "sink.path=out/zoo_images_class_lantern"),
    "zoo_images_class_lantern_coupled": (
        "zoo_images_class",
        "method=lantern_coupled_zoo",
        "sink.path=out/zoo_images_class_lantern_coupled",
    ),
    "zoo_images_eagle2": ("zoo_images", "method=eagle2_images", "sink.path=out/zoo_images_eagle2"),
    "zoo_images_lantern": ("zoo_images", "sink.path=out/zoo_images_lantern"),
    "zoo_images_lantern_coupled": (
        "zoo_images",
        "method=lantern_coupled_zoo",
        "sink.path=out/zoo_images_lantern_coupled",
    ),
    "zoo_images_lantern_pp": ("zoo_images", "method=lantern_pp", "sink.path=out/zoo_images_lantern_pp"),
    "zoo_lookup": ("zoo_caption_plain", "method=lookup", "sink.path=out/zoo_lookup"),
    "zoo_lvspec": ("zoo_caption", "method=lvspec", "sink.path=out/zoo_lvspec"),
    "zoo_lvspec_tree": ("zoo_caption", "method=lvspec_tree", "sink.path=out/zoo_lvspec_tree"),
    "zoo_medusa": ("zoo_caption_medusa",),
    "zoo_plain": ("zoo_caption_plain",),
    "zoo_random": ("zoo_caption", "method=random", "sink.path=out/zoo_random"),
    "zoo_rejection": ("zoo_caption", "method=rejection", "sampling.temperature=1.0", "sink.path=out/zoo_rejection"),
    "zoo_sage": ("zoo_caption", "method=sage", "sink.path=out/zoo_sage"),
    "zoo_sage_expansion": ("zoo_caption", "method=sage_expansion", "sink.path=out/zoo_sage_expansion"),
    "zoo_sage_node": ("zoo_caption", "method=sage_node", "sink.path=out/zoo_sage_node"),
    "zoo_sage_online": ("zoo_caption", "method=sage_online", "sink.path=out/zoo_sage_online"),
    "zoo_sd_chain": ("zoo_caption", "sink.path=out/zoo_sd_chain"),
    "zoo_sd_chain_caption": ("zoo_caption", "method=sd_chain_caption", "sink.path=out/zoo_sd_chain_caption"),
    "zoo_sd_chain_long": ("zoo_caption", "method=sd_chain_long", "sink.path=out/zoo_sd_chain_long"),
    "zoo_sd_chain_pooled": ("zoo_caption", "method=sd_chain_pooled", "sink.path=out/zoo_sd_chain_pooled"),
    "zoo_sd_chain_pruned": ("zoo_caption", "method=sd_chain_pruned", "sink.path=out/zoo_sd_chain_pruned"),
    "zoo_sd_chain_text": ("zoo_caption", "method=sd_chain_text", "sink.path=out/zoo_sd_chain_text"),
    "zoo_sd_tree": ("zoo_caption", "method=sd_tree", "sink.path=out/zoo_sd_tree"),
    "zoo_specvlm": ("zoo_caption", "method=specvlm", "sink.path=out/zoo_specvlm"),
    "zoo_specvlm_uniform": ("zoo_caption", "method=specvlm_uniform", "sink.path=out/zoo_specvlm_uniform"),
    "zoo_tabed_m_tree": ("zoo_caption", "method=tabed_m_tree", "sink.path=out/zoo_tabed_m_tree"),
    "zoo_tabed_m_tree3": ("zoo_caption", "method=tabed_m_tree3", "sink.path=out/zoo_tabed_m_tree3"),
    "zoo_tabed_mt": ("zoo_caption", "method=tabed_mt", "sink.path=out/zoo_tabed_mt"),
    "zoo_tabed_mt_tree": ("zoo_caption", "method=tabed_mt_tree", "sink.path=out/zoo_tabed_mt_tree"),
    "zoo_tabed_mt_tree3": ("zoo_caption", "method=tabed_mt_tree3", "sink.path=out/zoo_tabed_mt_tree3"),
    "zoo_tabed_mtcp": ("zoo_caption", "method=tabed_mtcp_zoo", "sink.path=out/zoo_tabed_mtcp"),
    "zoo_tabed_t_tree": ("zoo_caption", "method=tabed_t_tree", "sink.path=out/zoo_tabed_t_tree"),
    "zoo_tabed_t_tree3": ("zoo_caption", "method=tabed_t_tree3", "sink.path=out/zoo_tabed_t_tree3"),
    "zoo_typical": ("zoo_caption", "method=typical", "sink.path=out/zoo_typical"),
    "zoo_video_lvspec": ("zoo_videos", "method=lvspec", "sink.path=out/zoo_video_lvspec"),
    "zoo_video_plain": ("zoo_videos_plain",),
    "zoo_video_sage": ("zoo_videos", "method=sage", "sink.path=out/zoo_video_sage"),
    "zoo_video_sd": ("zoo_videos", "sink.path=out/zoo_video_sd"),
    "zoo_video_sd_pruned": ("zoo_videos", "method=sd_chain_pruned", "sink.path=out/zoo_video_sd_pruned"),
    "zoo_video_specvlm": ("zoo_videos", "method=specvlm", "sink.path=out/zoo_video_specvlm"),
}
"""Name: the job file's stem, and its overrides."""


def preset(name: str) -> tuple[Path, tuple[str, ...]]:
    """The job file and the overrides of a preset; a job file's stem is a preset without overrides.

    Raises:
        KeyError: no preset or job file has this name.
    """
    if name in PRESETS:
        job, *overrides = PRESETS[name]
        return JOBS / f"{job}.yaml", tuple(overrides)
    if not (JOBS / f"{name}.yaml").is_file():
        raise KeyError(name)
    return JOBS / f"{name}.yaml", ()
