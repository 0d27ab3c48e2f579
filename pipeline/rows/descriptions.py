"""The meaning of every output column, shown in `docs/reference/columns.md`. Types and order are the Arrow schemas'."""

from __future__ import annotations

_OUTCOME = {
    "job_id": "`job.name` and the config fingerprint",
    "attempt": "number of the job attempt that wrote the row",
    "error_type": "an [error code](error-codes.md); empty if the row did not fail",
    "error_message": "the error as text; empty if the row did not fail",
}
_PROVENANCE = {
    "method": "name of the method that decoded the row",
    "verify_mode": "`lossless` or `lossy`",
    "target_id": "path or hub id of the target, and its revision",
    "drafter_id": "the same for the drafter; empty if the method has no drafter checkpoint",
    "config_fingerprint": "hash of all settings that decide the content of rows",
    "telemetry": "see [below](#telemetry)",
}

CAPTIONS = {
    "sample_id": "the value of `source.id_column`, or `path#index`",
    "source": "source file, relative to the source root",
    "row_index": "index of the sample in that file",
    "clip_index": "index of the clip in its video, from 0; null for rows without video clips",
    "num_clips": "number of clips of the video; null for rows without video clips",
    "clip_start_s": "start of the clip in the video, in seconds; null for rows without video clips",
    "clip_end_s": "end of the clip in the video, in seconds; null for rows without video clips",
    "prompt_index": "index of the prompt among the prompts of its sample; null if there is one prompt",
    "num_prompts": "number of prompts of the sample; null if there is one prompt",
    **_OUTCOME,
    "status": "`success`, `truncated` (`max_new_tokens` reached) or `error`",
    "finish_reason": "`stop`, `length`, `stop_string` or `error`",
    "generated_text": "generated text",
    "mean_logprob": "mean log probability (natural log) of the tokens under the target, before temperature and filters",
    "num_input_tokens": "prompt tokens, visual tokens included",
    "num_visual_tokens": "visual tokens of the prompt",
    "num_generated_tokens": "generated tokens, the end-of-text token included",
    "seed": "the seed of the row if `columns.seed` is set, otherwise `job.seed`",
    **_PROVENANCE,
}

IMAGES = {
    "sample_id": "id of the prompt and number of the image: `<id>#0`",
    "source": "source file, relative to the source root",
    "row_index": "index of the prompt in that file",
    "prompt_id": "id of the prompt: the value of `source.id_column`, or `path#index`",
    "replica": "number of the image among the images of its prompt",
    **_OUTCOME,
    "status": "`success` or `error`",
    "finish_reason": "`length` or `error`",
    "image": "encoded image and a file name; null in error rows",
    "width_px": "width; 0 in error rows",
    "height_px": "height; 0 in error rows",
    "codes": "VQ codes in raster order; empty in error rows, unless only decoding the pixels failed",
    "prompt": "rendered prompt",
    "label": "class label; null if there is none",
    "mean_logprob": "mean log probability of the codes under the guided target, before temperature and filters",
    "num_input_tokens": "condition tokens without padding",
    "num_generated_tokens": "generated codes",
    "seed": "seed of the row, or of the job",
    "temperature": "temperature of the row, or of the job",
    "top_k": "top_k of the row, or of the job",
    "top_p": "top_p of the row, or of the job",
    "guidance_scale": "guidance scale of the row, or of the job",
    **_PROVENANCE,
}

TELEMETRY = {
    "num_spec_steps": "verify steps after prefill",
    "num_draft_tokens": "drafted tokens",
    "num_accepted_draft_tokens": "accepted drafted tokens",
    "mean_acceptance_length": "1 + accepted / steps",
    "draft_acceptance_rate": "accepted / drafted",
    "acceptance_histogram": "entry i: number of steps that accepted i drafted tokens",
    "num_relaxed_accepts": "accepted drafted tokens that differ from the target's own choice; 0 for lossless methods",
    "ended_inside_path": "whether the text ends at an accepted drafted token",
    "target_forwards": "target forwards, prefill included",
    "drafter_forwards": "drafter forwards, prefill included",
    "prefill_ms": "the row's share of its batches' prefill time",
    "draft_ms": "the row's share of its batches' drafting time",
    "verify_ms": "the row's share of its batches' verification time",
    "batch_size_mean": "mean number of active slots over the row's steps",
    "degraded": "whether the drafter failed on this row, so that the row was decoded without it",
    "extras": "JSON object: counters of methods; `drafter_error` (code and message) if the drafter prompt failed; "
    "`kernels` (the target's kernel path) in half precision",
}
