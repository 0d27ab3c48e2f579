"""Tiers of the suite, by prefixes of node ids: `make test-fast` ⊂ `make test` ⊂ `make test-all`.

`SLOW` tests run in `make test-all` only: they cover cases beyond those of `make test`. `make test-fast` also leaves out
`HEAVY`: Ray, compilers, other processes, and conformance of whole engines.
"""

from __future__ import annotations

# Of each of these tests, `make test` runs the first seeds.
_INVENTORIES = "tests/pipeline/output/test_inventory.py::test_kills_and_overlaps_leave_inventories_that_are_equal"
_SHARD_IDS = "tests/pipeline/run/test_shard_ids.py::test_kills_overlaps_and_retries_of_shards_leave_every_id_once"
_SHARDS = "tests/pipeline/run/test_shards.py::test_kills_and_overlapping_attempts_of_shards_cost_no_row_and_double_none"
_DYING_SHARD = "tests/pipeline/run/test_shard_ids.py::test_a_shard_that_dies_while_ids_are_compared_is_taken_up"

# Of these products of cases, `make test` runs every method, family and kind of tree in some of its cases.
_IMAGES = "tests/conformance/test_images.py"
_EQUAL_IMAGES = f"{_IMAGES}::test_every_image_equals_the_slow_reference"
_IMAGE_METHODS = (
    *("eagle2", "eagle3", "jacobi", "jacobi+lantern-zero", "lantern-zero", "layer-skip"),
    *("medusa", "plain", "sd-chain", "sd-dynamic", "sd-tree", "suffix"),
)
_NO_SYNC = f"{_IMAGES}::test_a_guided_step_asks_the_device_nothing"
_LOSSLESS = "tests/conformance/test_lossless.py"
_PACKED = "tests/models/inputs/test_packed_requests.py::test_tokens_and_acceptance_equal_those_of_pixels"
_LAYERS = "tests/models/kv/test_feature_layers.py::test_features_are_the_inputs_of_layers_in_transformers"
_ROUNDED = "tests/models/loading/test_quantization.py::test_output_is_that_of_transformers_with_the_rounded_weights"
_EXPORTS = "tests/pipeline/exports/test_kills.py::test_a_second_export_at_the_same_time_changes_nothing"
_MEMORY = f"{_LOSSLESS}::test_every_row_of_memory_equals_a_fresh_prefill"
_ORDER = f"{_LOSSLESS}::test_output_and_acceptance_do_not_depend_on_batch_order_or_slot"
_FAULTS = "tests/conformance/test_faults.py::test_a_planted_fault_is_caught"
_DEADLINE = "tests/pipeline/sources/test_web.py::test_one_deadline_bounds_every_part_of_an_answer"
_LEVELS = "tests/models/backends/cuda/test_tree_attention.py::test_a_drafters_level_sees_the_levels_before_it"
_KILLS = (
    "tests/pipeline/run/test_recovery.py::test_a_kill_while_repeated_ids_are_settled_is_recovered_by_the_next_attempt"
)
_RESUME = "tests/pipeline/run/test_resume.py::test_a_second_run_makes_only_what_is_missing"
_PROCESSORS = "tests/conformance/test_processors.py::test_tokens_equal_those_of_generate"
_REPLAY = "tests/decoding/scheduling/test_replay.py::test_replayed"
_FURTHER_CASES = (
    f"{_REPLAY}_steps_equal_launched_ones[greedy",
    *(f"{_REPLAY}_images_equal_the_slow_reference[{mode}-" for mode in ("greedy", "sampled-guided")),
    *(f"{_EQUAL_IMAGES}[{method}-{case}" for method in _IMAGE_METHODS for case in ("class-9", "text-1")),
    *(f"{_EQUAL_IMAGES}[{method}-class" for method in ("jacobi-above", "jacobi-wide", "layer-skip-tree")),
    *(f"{_NO_SYNC}[{method}]" for method in ("jacobi+lantern-zero", "jacobi-above", "jacobi-wide", "layer-skip-tree")),
    *(f"{_NO_SYNC}[{method}]" for method in ("eagle3", "medusa", "sd-dynamic", "suffix")),
    f"{_IMAGES}::test_an_independent_drafter",
    f"{_IMAGES}::test_the_codes_keep_the_targets_distribution_under_guidance_and_top_k[rejection",
    *(
        f"{_LOSSLESS}::test_a_text_ends_at_its_eos_wherever_in_the_tree_it_falls[{case}"
        for case in ("llava-b", "llava-c")
    ),
    f"{_LOSSLESS}::test_a_text_ends_at_its_eos_wherever_in_the_tree_it_falls[llama-chain",
    f"{_LOSSLESS}::test_sampled_output_equals_plain_sampling_under_shared_noise[llama-chain",
    f"{_LOSSLESS}::test_sampled_output_equals_plain_sampling_under_shared_noise[llava-branching",
    f"{_LOSSLESS}::test_a_stop_string_ends_the_text_and_is_cut_off[llama",
    *(f"{_PACKED}[{case}" for case in ("llava_next-attention", "llava_next-full", "llava_onevision-attention")),
    *(f"{_PACKED}[{case}" for case in ("llava-a", "llava-p", "llava_onevision-p", "qwen2_5_vl-f", "qwen2_5_vl-p")),
    *(f"{_LAYERS}[{case}" for case in ("llama-captured", "llava-compiled", "llava-eager", "qwen2_5_vl-captured")),
    *(f"{_LAYERS}[{case}" for case in ("qwen3_vl-captured", "qwen3_vl-compiled")),
    *(f"{_ROUNDED}[{case}" for case in ("fp8-chain", "fp8-plain", "int8-tree")),
    *(f"{_EXPORTS}[{case}]" for case in ("append json", "overwrite", "skip")),
    *(
        f"tests/conformance/test_zoo_pair.py::test_greedy_output_equals_generate[{case}"
        for case in ("chain-4", "chain-9", "static")
    ),
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[grammar+tree-greedy",
    "tests/conformance/test_structures.py::test_masks_follow_the_last_step_with_asynchronous_output_processing[tree",
    "tests/models/backends/cuda/test_tree_attention.py::test_a_tree_kernel_gives_the_output_of_masked_attention[llava-5",
    *(
        f"{_LOSSLESS}::test_greedy_output_equals_generate[{family}-{drafter}-{tree}-{slots}]"
        for family in ("llama", "llava")
        for drafter in ("perturbed", "right", "wrong")
        for tree in ("branching", "chain")
        for slots in (1, 9)
    ),
    *(f"{_MEMORY}[llava-{case}" for case in ("none", "perturbed-chain", "right")),
    *(f"{_MEMORY}[llama-{case}" for case in ("perturbed-branching", "right-chain")),
    *(f"{_ORDER}[{case}" for case in ("branching-greedy", "chain")),
    *(
        f"{_FAULTS}[{fault}"
        for fault in ("noise_is_keyed_by_slot", "refill_keeps", "residual_reuses", "second_sibling")
    ),
    *(
        f"{_DEADLINE}[{part}]"
        for part in ("100 Continue", "body to the end", "chunk extension", "chunk size", "header name")
    ),
    *(f"{_LEVELS}[interpreted-{case}" for case in ("1-2", "1-4", "3-4")),
    *(f"{_LEVELS}[interpreted, split-{case}" for case in ("1-2", "3-4")),
    *(f"{_RESUME}[{case}" for case in ("1-", "3-images", "3-lines", "3-tars")),
    *(f"{_KILLS}[{number}]" for number in (1, 2, 4, 5, 7)),
    "tests/models/inputs/test_packed_requests.py::test_features_of_equal_media_are_found_again[llava",
    "tests/models/inputs/test_packed_requests.py::test_pooled_contexts_read_packed_outputs[llava",
    "tests/pipeline/output/test_publishing.py::test_every_row_is_published_once",
    "tests/pipeline/sources/test_csv.py::test_an_index_of_ranges",
    "tests/pipeline/sources/test_lines.py::test_an_index_of_ranges",
    "tests/pipeline/media/test_prompt_processor.py::test_a_processor_that_hangs",
)

SLOW = (
    *_FURTHER_CASES,
    "tests/actors/auto/test_trial.py",
    "tests/actors/serving/test_heartbeat.py",
    "tests/actors/test_poison.py",
    "tests/benchmarks/test_engine_cells.py",
    "tests/benchmarks/test_gpu.py",
    "tests/benchmarks/test_inflate.py",
    "tests/benchmarks/test_planner.py::test_a_case",
    "tests/benchmarks/test_scale.py::test_a_paced_job",
    "tests/benchmarks/test_long_context.py",
    "tests/chaos/",
    "tests/conformance/test_adaptive.py",
    "tests/conformance/test_block.py",
    "tests/conformance/test_catch_up.py",
    "tests/conformance/test_compile.py",
    "tests/conformance/test_distribution.py",
    "tests/conformance/test_erratic.py",
    "tests/conformance/test_families.py",
    "tests/conformance/test_faults.py::test_the_same_check",
    "tests/conformance/test_faults_",
    "tests/conformance/test_grammars.py",
    "tests/conformance/test_heads.py",
    "tests/conformance/test_lantern_images.py",
    "tests/conformance/test_late_reads.py",
    "tests/conformance/test_layer_skip.py",
    "tests/conformance/test_methods.py::test_acceptance_in_a_batch",
    "tests/conformance/test_methods.py::test_other_cases",
    "tests/conformance/test_no_sync.py",
    *(f"{_PROCESSORS}[llama-{name}" for name in ("dynamic", "jacobi", "medusa", "sd-chain", "suffix")),
    *(f"{_PROCESSORS}[llava-{name}" for name in ("block", "sage", "specvlm")),
    "tests/conformance/test_prompts_ahead.py",
    "tests/conformance/test_relaxed.py",
    "tests/conformance/test_sharing.py",
    "tests/conformance/test_training_free.py",
    "tests/conformance/test_structures.py::test_no_rule",
    "tests/conformance/test_structures.py::test_tokens_do_not",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[dynamic",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[grammar+model",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[grammar-",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[lookup",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[model",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[plain",
    "tests/conformance/test_structures.py::test_tokens_equal_those_of_generate[tree",
    "tests/conformance/test_visual_ends.py",
    "tests/conformance/test_vocabulary.py",
    "tests/decoding/acceptance/test_lantern_residual.py",
    "tests/decoding/acceptance/test_rules_on_the_device.py",
    "tests/decoding/controllers/test_goodput.py",
    "tests/decoding/drafters/test_ensemble.py",
    "tests/decoding/drafters/test_failing_drafters.py",
    "tests/decoding/drafters/test_heads_on_device.py::test_a_whole_step_compiles",
    "tests/decoding/test_adaptive_steps.py",
    "tests/decoding/test_degraded_prompts.py",
    "tests/gpu/",
    "tests/jobs/test_audit.py",
    "tests/jobs/test_auto.py",
    "tests/jobs/test_caption.py::test_a_limited_run",
    "tests/jobs/test_caption.py::test_every_row_of_tars",
    "tests/jobs/test_caption.py::test_plain_decoding_gives_the_same_texts",
    "tests/jobs/test_caption_videos.py",
    "tests/jobs/test_cluster.py",
    "tests/jobs/test_deaths.py",
    "tests/jobs/test_engine_start.py",
    "tests/jobs/test_demo.py",
    "tests/jobs/test_estimate.py",
    "tests/jobs/test_frozen.py",
    "tests/jobs/test_generation_settings.py::test_a_job",
    "tests/jobs/test_graph.py",
    "tests/jobs/test_hostile_inputs.py",
    "tests/jobs/test_impossible_requests.py::test_a_dry_run_starts_no_process",
    "tests/jobs/test_poison.py",
    "tests/jobs/test_processor_places.py",
    "tests/jobs/test_progress.py::test_nothing_is_shown",
    "tests/jobs/test_progress.py::test_what_actors_report",
    "tests/jobs/test_ray_session.py",
    "tests/jobs/test_signals.py",
    "tests/jobs/test_stores.py",
    "tests/jobs/test_structured_output.py",
    "tests/jobs/test_synthesis_graph.py",
    "tests/jobs/test_synthesize.py::test_an_output_without_images",
    "tests/jobs/test_synthesize.py::test_classes_are_drawn",
    "tests/jobs/test_synthesize.py::test_codes_do_not_depend_on",
    "tests/jobs/test_synthesize.py::test_features_that_cannot_be_drawn",
    "tests/jobs/test_train_drafter.py",
    "tests/jobs/test_train_on_output.py",
    "tests/jobs/test_verify.py",
    "tests/models/backends/cpu/test_attention.py::test_where_they_cannot_be_built",
    "tests/models/backends/cpu/test_compiled.py",
    "tests/models/backends/cpu/test_decoder_frame.py",
    "tests/models/backends/cuda/test_fused_layers.py",
    "tests/models/backends/cuda/test_graphs.py",
    "tests/models/backends/cuda/test_tree_attention.py::test_any_mask",
    "tests/models/backends/cuda/test_tree_attention.py::test_the_kernel_equals_one_mask",
    "tests/models/backends/test_equality.py::test_a_wrong_backend",
    "tests/models/backends/test_steady_state.py",
    "tests/models/heads/test_training.py",
    "tests/models/inputs/test_packed_requests.py::test_tokens_and_acceptance_equal_those_of_pixels[qwen3_vl",
    "tests/models/inputs/test_shared_inputs.py",
    "tests/models/kv/test_feature_layers.py::test_features_are_the_inputs_of_layers_in_transformers[llama-compiled",
    "tests/models/loading/test_placement.py",
    "tests/pipeline/cluster/test_partitions.py::test_ray_tasks",
    "tests/pipeline/exports/test_dataset.py::test_all_images",
    "tests/pipeline/exports/test_dataset.py::test_images_of_tars",
    "tests/pipeline/exports/test_kills.py::test_kills_at_",
    "tests/pipeline/exports/test_on_s3.py",
    "tests/pipeline/media/test_image_worker.py",
    "tests/pipeline/media/test_memory.py",
    "tests/pipeline/media/video/test_shots.py::test_hostile_films",
    "tests/pipeline/media/video/test_shots.py::test_ids_of_shots",
    "tests/pipeline/media/video/test_shots.py::test_shots_cover",
    "tests/pipeline/media/video/test_worker.py",
    *(f"{_INVENTORIES}[one row-{seed}" for seed in range(1, 4)),
    f"{_INVENTORIES}[two rows",
    "tests/pipeline/reports/test_report_in_chromium.py",
    "tests/pipeline/run/test_fencing.py",
    "tests/pipeline/run/test_resume_on_s3.py",
    _SHARD_IDS,
    *(f"{_SHARDS}[{seed}" for seed in range(1, 5)),
    *(f"{_DYING_SHARD}[{num_writes}" for num_writes in range(3, 9)),
    "tests/pipeline/storage/test_checkpoint_cache.py",
    "tests/pipeline/storage/test_checkpoints.py",
    "tests/pipeline/storage/test_object_storage.py",
    "tests/benchmarks/test_lantern.py",
    "tests/zoo/test_build.py",
    "tests/zoo/test_image_decoding.py",
    "tests/zoo/test_image_models.py",
    "tests/zoo/test_real.py",
    "tests/zoo/test_real_vision.py::test_training_resumes",
    "tests/zoo/test_text_pair.py::test_the_target_describes_held_out_scenes",
    "tests/zoo/test_video_pair.py::test_the_target_captions_held_out_clips",
)
HEAVY = (
    "tests/actors/",
    "tests/benchmarks/",
    "tests/conformance/",
    "tests/decoding/drafters/test_heads_on_device.py",
    "tests/decoding/scheduling/",
    "tests/decoding/trees/test_chain.py",
    "tests/decoding/trees/test_dynamic.py::test_growing_compiles",
    "tests/jobs/",
    "tests/models/backends/",
    "tests/models/heads/",
    "tests/models/inputs/",
    "tests/models/kv/",
    "tests/models/loading/",
    "tests/pipeline/exports/",
    "tests/pipeline/media/",
    "tests/pipeline/reports/test_report_in_chromium.py",
    "tests/pipeline/run/",
    "tests/pipeline/output/",
    "tests/pipeline/source/",
    "tests/pipeline/sources/",
    "tests/pipeline/storage/",
    "tests/pipeline/training/",
    "tests/test_layers.py",
    "tests/zoo/",
)


def markers_of(node_id: str) -> list[str]:
    """The markers `slow` and `heavy` of a test, by its pytest node id."""
    return [name for name, tier in (("slow", SLOW), ("heavy", HEAVY)) if node_id.startswith(tier)]
