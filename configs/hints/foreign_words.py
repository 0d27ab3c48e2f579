"""Maps words of vLLM, Ray, NeMo Curator and transformers to the keys of job files that do the same."""

from __future__ import annotations

from typing import NamedTuple


class ForeignWord(NamedTuple):
    """The dotted path of the key here, empty if there is none, and what to do."""

    key: str
    advice: str


FOREIGN_WORDS: dict[str, ForeignWord] = {
    # vLLM
    "tensor_parallel": ForeignWord("pool.num_gpus", "layers of a target are spread over the GPUs of an actor"),
    "tensor_parallel_size": ForeignWord("pool.num_gpus", "layers of a target are spread over the GPUs of an actor"),
    "pipeline_parallel_size": ForeignWord("pool.num_gpus", "layers of a target are spread over the GPUs of an actor"),
    "data_parallel_size": ForeignWord("pool.max_size", "each actor holds its own models"),
    "max_num_seqs": ForeignWord("pool.slots", "the samples that an engine decodes at once"),
    "max_num_batched_tokens": ForeignWord("pool.max_prefill_tokens", "the tokens of one prefill forward"),
    "max_model_len": ForeignWord("pool.max_context_tokens", "the tokens of prompt, images and output together"),
    "max_seq_len_to_capture": ForeignWord("pool.capture", "auto captures all steps on one GPU"),
    "enforce_eager": ForeignWord("pool.capture", "never runs steps without CUDA graphs"),
    "gpu_memory_utilization": ForeignWord("pool.slots", "auto takes the slots that memory holds"),
    "kv_cache_dtype": ForeignWord("model.target.dtype", "the KV cache has the dtype of the weights"),
    "quantization": ForeignWord("model.target.quantization", "int8, or fp8 on a GPU"),
    "dtype": ForeignWord("model.target.dtype", "each model has a dtype of its own"),
    "revision": ForeignWord("model.target.revision", "each model has a revision of its own"),
    "trust_remote_code": ForeignWord("model.target.allow_remote_code", "code of a checkpoint runs only if allowed"),
    "speculative_model": ForeignWord("model.drafter.path", "and method.drafter.kind names what it is"),
    "speculative_config": ForeignWord("method.drafter.kind", "the section method describes speculation"),
    "num_speculative_tokens": ForeignWord("method.tree.length", "the length of a chain of drafts"),
    "max_tokens": ForeignWord("sampling.max_new_tokens", "the most generated tokens of a row"),
    "stop_token_ids": ForeignWord("sampling.stop", "texts that end the output"),
    "guided_json": ForeignWord("output.json_schema", "a JSON schema that texts follow"),
    "guided_regex": ForeignWord("output.regex", "a regular expression that texts match"),
    "guided_choice": ForeignWord("output.choices", "a list of texts"),
    "limit_mm_per_prompt": ForeignWord("pool.max_context_tokens", "images of a row count as tokens of its context"),
    # Ray Data
    "concurrency": ForeignWord("pool.max_size", "the number of actors, from pool.min_size on"),
    "num_workers": ForeignWord("pool.max_size", "the number of actors, from pool.min_size on"),
    "batch_size": ForeignWord("pool.slots", "the samples decoded at once; a Ray batch has pool.batch_rows"),
    "max_concurrent_batches": ForeignWord("pool.max_batches_in_flight", "the batches that feed one engine"),
    "max_tasks_in_flight_per_actor": ForeignWord("pool.max_batches_in_flight", "the batches that feed one engine"),
    "max_errored_blocks": ForeignWord("job.max_error_share", "errors are counted by row"),
    "address": ForeignWord("job.ray_address", "local, auto, or the address of a cluster"),
    # NeMo Curator
    "input_path": ForeignWord("source.path", "a folder, a file or a URL"),
    "output_path": ForeignWord("sink.path", "the folder or URL of the output"),
    "input_data_dir": ForeignWord("source.path", "a folder, a file or a URL"),
    "output_data_dir": ForeignWord("sink.path", "the folder or URL of the output"),
    "files_per_partition": ForeignWord("source.span_max_rows", "the rows of one read task"),
    "add_filename": ForeignWord("sink.keep_columns", "rows have the column source already"),
    # transformers
    "model_name_or_path": ForeignWord("model.target.path", "a folder, a hub id or a URL"),
    "model_name": ForeignWord("model.target.path", "a folder, a hub id or a URL"),
    "assistant_model": ForeignWord("model.drafter.path", "and method.drafter.kind names what it is"),
    "num_assistant_tokens": ForeignWord("method.tree.length", "the length of a chain of drafts"),
    "do_sample": ForeignWord("sampling.temperature", "0 is greedy decoding"),
    "torch_dtype": ForeignWord("model.target.dtype", "each model has a dtype of its own"),
    "device_map": ForeignWord("pool.num_gpus", "layers of a target are spread over the GPUs of an actor"),
    "load_in_8bit": ForeignWord("model.target.quantization", "int8"),
    "num_beams": ForeignWord("", "beam search is not supported"),
}
"""Words by which users look for a key, in lower case."""


def foreign_hint(word: str) -> str:
    """Return the advice for a word of another program; empty if it is not one."""
    known = FOREIGN_WORDS.get(word.lower().replace("-", "_"))
    if known is None:
        return ""
    return f"use {known.key}: {known.advice}" if known.key else known.advice
