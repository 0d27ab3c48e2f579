"""Tiers of the suite, by prefixes of node ids: `make test-fast` ⊂ `make test` ⊂ `make test-all`.

`SLOW` tests run in `make test-all` only: they cover cases beyond those of `make test`. `make test-fast` also leaves out
`HEAVY`: Ray, compilers, other processes, and conformance of whole engines.
"""

from __future__ import annotations

SLOW = (
    "tests/actors/serving/test_heartbeat.py",
    "tests/actors/test_poison.py",
    "tests/benchmarks/test_gpu.py",
    "tests/chaos/",
    "tests/conformance/test_adaptive.py",
    "tests/conformance/test_catch_up.py",
    "tests/conformance/test_compile.py",
    "tests/conformance/test_distribution.py",
    "tests/conformance/test_erratic.py",
    "tests/conformance/test_faults_",
    "tests/conformance/test_heads.py",
    "tests/conformance/test_lantern_images.py",
    "tests/conformance/test_late_reads.py",
    "tests/conformance/test_no_sync.py",
    "tests/conformance/test_prompts_ahead.py",
    "tests/conformance/test_sharing.py",
    "tests/conformance/test_visual_ends.py",
    "tests/conformance/test_vocabulary.py",
    "tests/decoding/acceptance/test_rules_on_the_device.py",
    "tests/decoding/drafters/test_ensemble.py",
    "tests/decoding/drafters/test_failing_drafters.py",
    "tests/decoding/test_degraded_prompts.py",
    "tests/jobs/test_auto.py",
    "tests/jobs/test_caption.py::test_a_limited_run",
    "tests/jobs/test_caption.py::test_plain_decoding_gives_the_same_texts",
    "tests/jobs/test_caption_videos.py",
    "tests/jobs/test_cluster.py",
    "tests/jobs/test_deaths.py",
    "tests/jobs/test_estimate.py",
    "tests/jobs/test_frozen.py",
    "tests/jobs/test_graph.py",
    "tests/jobs/test_hostile_inputs.py",
    "tests/jobs/test_poison.py",
    "tests/jobs/test_ray_session.py",
    "tests/jobs/test_signals.py",
    "tests/jobs/test_stores.py",
    "tests/jobs/test_synthesis_graph.py",
    "tests/jobs/test_synthesize.py::test_classes_are_drawn",
    "tests/jobs/test_synthesize.py::test_codes_do_not_depend_on",
    "tests/jobs/test_train_drafter.py",
    "tests/models/backends/cpu/test_compiled.py",
    "tests/models/backends/cpu/test_decoder_frame.py",
    "tests/models/backends/cuda/test_graphs.py",
    "tests/models/backends/test_steady_state.py",
    "tests/pipeline/media/test_image_worker.py",
    "tests/pipeline/media/test_memory.py",
    "tests/pipeline/media/video/test_worker.py",
    "tests/pipeline/run/test_fencing.py",
    "tests/pipeline/run/test_resume_on_s3.py",
    "tests/pipeline/storage/test_checkpoint_cache.py",
    "tests/pipeline/storage/test_checkpoints.py",
    "tests/test_benchmarks_lantern.py",
    "tests/zoo/test_image_decoding.py",
)
HEAVY = (
    "tests/actors/",
    "tests/benchmarks/",
    "tests/conformance/",
    "tests/jobs/",
    "tests/models/backends/",
    "tests/models/heads/",
    "tests/models/inputs/",
    "tests/models/loading/",
    "tests/pipeline/media/",
    "tests/pipeline/run/",
    "tests/pipeline/output/",
    "tests/pipeline/sources/",
    "tests/pipeline/storage/",
    "tests/test_layers.py",
    "tests/zoo/",
)


def markers_of(node_id: str) -> list[str]:
    """The markers `slow` and `heavy` of a test, by its pytest node id."""
    return [name for name, tier in (("slow", SLOW), ("heavy", HEAVY)) if node_id.startswith(tier)]
