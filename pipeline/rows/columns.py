"""Lists name, Arrow type and meaning of the columns of caption outputs and of differences between outputs; the source
of `docs/reference/columns.md`."""

from __future__ import annotations

import pyarrow as pa

Columns = list[tuple[str, pa.DataType, str]]

TEXT, NUMBER, INT32, INT64 = pa.string(), pa.float64(), pa.int32(), pa.int64()

TELEMETRY: Columns = [
    ("num_spec_steps", INT64, "verify steps after prefill"),
    ("num_draft_tokens", INT64, "drafted tokens"),
    ("num_accepted_draft_tokens", INT64, "accepted drafted tokens"),
    ("mean_acceptance_length", NUMBER, "1 + accepted / steps"),
    ("draft_acceptance_rate", NUMBER, "accepted / drafted"),
    ("acceptance_histogram", pa.list_(INT64), "entry i: number of steps that accepted i drafted tokens"),
    (
        "num_relaxed_accepts",
        INT64,
        "accepted drafted tokens that differ from the target's own choice; 0 for lossless methods",
    ),
    ("ended_inside_path", pa.bool_(), "whether the text ends at an accepted drafted token"),
    ("target_forwards", INT64, "target forwards, prefill included"),
    ("drafter_forwards", INT64, "drafter forwards, prefill included"),
    ("prefill_ms", NUMBER, "the row's share of its batches' prefill time"),
    (
        "draft_ms",
        NUMBER,
        "the row's share of its batches' drafting time; steps that a GPU replays whole count as verification",
    ),
    ("verify_ms", NUMBER, "the row's share of its batches' verification time"),
    ("batch_size_mean", NUMBER, "mean number of active slots over the row's steps"),
    ("degraded", pa.bool_(), "whether the drafter failed on this row, so that the row was decoded without it"),
    (
        "extras",
        TEXT,
        "JSON object: counters of methods; `drafter_error` (code and message) if the drafter prompt failed; "
        "`kernels` (the target's kernel path) in half precision",
    ),
]
"""Telemetry per row, with vLLM's metric names where vLLM has the metric."""
SOURCE: Columns = [("source", TEXT, "source file, relative to the source root")]
ATTEMPT: Columns = [
    ("job_id", TEXT, "`job.name` and the config fingerprint"),
    ("attempt", INT32, "number of the job attempt that wrote the row"),
]
ERROR: Columns = [
    ("error_type", TEXT, "an [error code](error-codes.md); empty if the row did not fail"),
    ("error_message", TEXT, "the error as text; empty if the row did not fail"),
]
PROVENANCE: Columns = [
    ("method", TEXT, "name of the method that decoded the row"),
    ("verify_mode", TEXT, "`lossless` or `lossy`"),
    ("target_id", TEXT, "path or hub id of the target, and its revision"),
    ("drafter_id", TEXT, "the same for the drafter; empty if the method has no drafter checkpoint"),
    ("config_fingerprint", TEXT, "hash of all settings that decide the content of rows"),
    ("telemetry", pa.struct([(name, kind) for name, kind, _ in TELEMETRY]), "see [below](#telemetry)"),
]
AUDIT: Columns = [
    ("audit_text", TEXT, "text of plain decoding of the row; empty if the row is not audited"),
    ("audit_token_ids", pa.list_(INT32), "tokens of plain decoding of the row; only with `sink.keep_tokens`"),
    (
        "audit_loss",
        NUMBER,
        "loss of the row against plain decoding, from 0 (none) to 1, by `audit.metric`; null if the row is not "
        "audited, or plain decoding of it failed",
    ),
]
"""Columns of jobs with the section `audit`."""
LOOPS: Columns = [
    (
        "loop_start",
        INT32,
        "index of the first generated token of the repetition that ended the text; null unless `finish_reason` is "
        "`looped`; only with `sampling.stop_loops`",
    ),
]
CHECKS: Columns = [
    (
        "failed_checks",
        pa.list_(TEXT),
        "checks that the text fails: `empty`, `too_short`, `looped`, `wrong_script`, `python`; an empty list if it "
        "passes, or the row failed; only with `checks`",
    ),
]
RETRY: Columns = [
    (
        "retry_index",
        INT32,
        "number of the further attempt that made the text, 0 for the first; only with `retry`",
    ),
]
REPLICA: Columns = [
    (
        "replica",
        INT32,
        "index of the caption among the captions of its prompt; only with `sampling.num_captions_per_prompt` above 1",
    ),
]
PARTIAL: Columns = [
    (
        "partial_video",
        TEXT,
        "the part of its videos that the row shows, and why: `late_start: …` (the file begins inside a group of "
        "pictures), `damaged: …`; empty if it is all; only of jobs that may read videos, with "
        "`source.video.report_partial`",
    ),
]
CAPTIONS: Columns = [
    (
        "sample_id",
        TEXT,
        "the value of `source.id_column`, or `path#index`; `<id>#<n>` if a sample has several prompts or captions",
    ),
    *SOURCE,
    ("row_index", INT64, "index of the sample in that file"),
    ("clip_index", INT32, "index of the clip in its video, from 0; null for rows without video clips"),
    ("num_clips", INT32, "number of clips of the video; null for rows without video clips"),
    ("clip_start_s", NUMBER, "start of the clip in the video, in seconds; null for rows without video clips"),
    ("clip_end_s", NUMBER, "end of the clip in the video, in seconds; null for rows without video clips"),
    *PARTIAL,
    ("prompt_index", INT32, "index of the prompt among the prompts of its sample; null if there is one prompt"),
    ("num_prompts", INT32, "number of prompts of the sample; null if there is one prompt"),
    *REPLICA,
    *ATTEMPT,
    ("status", TEXT, "`success`, `truncated` (`max_new_tokens` reached, or a loop) or `error`"),
    *ERROR,
    ("finish_reason", TEXT, "`stop`, `length`, `stop_string`, `looped` or `error`"),
    *LOOPS,
    *CHECKS,
    *RETRY,
    ("generated_text", TEXT, "generated text"),
    (
        "token_ids",
        pa.list_(INT32),
        "generated tokens as the target chose them, the end-of-text token included; only with `sink.keep_tokens`",
    ),
    (
        "mean_logprob",
        NUMBER,
        "mean log probability (natural log) of the tokens under the target, before temperature and filters",
    ),
    ("num_input_tokens", INT64, "prompt tokens, visual tokens included"),
    ("num_visual_tokens", INT64, "visual tokens of the prompt"),
    ("num_generated_tokens", INT64, "generated tokens, the end-of-text token included"),
    ("seed", INT64, "the seed of the row if `columns.seed` is set, otherwise `job.seed`"),
    *AUDIT,
    *PROVENANCE,
]
DIFFERENCES: Columns = [
    ("sample_id", TEXT, "id of the row"),
    ("source", TEXT, "source file, relative to the source root"),
    ("row_index", INT64, "index of the sample in that file"),
    (
        "outcome",
        TEXT,
        "`tie` (the first difference is within the tie tolerance), `different`, or `not_compared` (the second decoding "
        "has no result)",
    ),
    ("compared", TEXT, "`tokens`, or `text` if the output has no tokens of the row"),
    ("position", INT64, "index of the first token, or character, that differs"),
    ("recorded_token", INT32, "the output's token at this position; null at its end, or without tokens"),
    ("decoded_token", INT32, "the token of the second decoding at this position; null at its end"),
    (
        "margin",
        NUMBER,
        "the target's score of `decoded_token` minus that of `recorded_token`, after the tokens before them",
    ),
    ("tolerance", NUMBER, "largest absolute margin of a tie"),
    ("loss", NUMBER, "loss of the row by the metric, from 0 to 1"),
    ("recorded_text", TEXT, "text in the output"),
    ("decoded_text", TEXT, "text of the second decoding"),
    ("recorded_token_ids", pa.list_(INT32), "tokens in the output; null without tokens"),
    ("decoded_token_ids", pa.list_(INT32), "tokens of the second decoding"),
    ("recorded_finish_reason", TEXT, "finish reason in the output"),
    ("decoded_finish_reason", TEXT, "finish reason of the second decoding"),
    ("error_type", TEXT, "error code of the second decoding, if it failed"),
    ("error_message", TEXT, "its message"),
]
"""Columns of the differences that `jobs.verify` writes: one row per row that is not equal."""
