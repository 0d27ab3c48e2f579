"""Loads pairs that share one target, and decodes requests with their engines or with transformers' `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from actors.loading.drafters import Head, is_head, load_head
from actors.loading.loaded_pair import compile_models
from actors.loading.pair import SHARED_INPUT_BYTES, Pair, check, load, load_target
from benchmarks.harness.engines import encode, run_requests
from benchmarks.peers.transformers_peer import generate_all, set_greedy
from configs.schema import CaptionJobConfig, CheckpointConfig
from decoding import Completion, Request
from models.target import Target


def load_all(jobs: Mapping[str, CaptionJobConfig]) -> dict[str, Pair]:
    """Load the target of the first job, and beside it the drafters of all others, each checkpoint once."""
    first, *others = jobs
    base = load(without_cache(jobs[first]))
    drafters: dict[str, Target | Head] = {}
    return {first: base, **{name: load_beside(base, without_cache(jobs[name]), drafters) for name in others}}


def without_cache(job: CaptionJobConfig) -> CaptionJobConfig:
    """Return the job without a cache of visual features."""
    return job.model_copy(update={"pool": job.pool.model_copy(update={"feature_cache_bytes": 0})})


def load_beside(base: Pair, job: CaptionJobConfig, drafters: dict[str, Target | Head]) -> Pair:
    """Return the pair of a job whose target `base` has loaded; `drafters` has the loaded ones by path."""
    info, checkpoint = check(job), job.model.drafter
    if checkpoint is None or not job.method.needs_checkpoint:
        return Pair(job, base.target, None, info)
    if checkpoint.path not in drafters:
        drafters[checkpoint.path] = load_head(job, base.target) if is_head(job) else load_model(base, job, checkpoint)
    return Pair(job, base.target, drafters[checkpoint.path], info)


def load_model(base: Pair, job: CaptionJobConfig, checkpoint: CheckpointConfig) -> Target:
    drafter = load_target(checkpoint, "model.drafter")
    drafter.share_front_end(base.target, SHARED_INPUT_BYTES)
    compile_models(job.pool, [base.target, drafter])
    return drafter


class Contender(Protocol):
    """Decodes requests; its completions are None if it is not this engine. `is_timed_once` is whether it decodes those
    of the first round only."""

    is_timed_once: bool

    def decode(self, requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[Completion] | None]: ...


class OfEngine:
    """Engine of one method and batch size, without the finished outputs of earlier engines, which have its prompts."""

    is_timed_once = False

    def __init__(self, pair: Pair, batch: int) -> None:
        pair.corpora.clear()
        self._front_end = pair.target.front_end
        self._engine = pair.engine(batch)

    def decode(self, requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[Completion] | None]:
        self._front_end.keep(SHARED_INPUT_BYTES)  # drops the inputs of the method before
        done = run_requests(self._engine, requests)
        return [completion.token_ids for completion in done], done


class OfTransformers:
    """`generate` over the target's weights, on prompts of similar lengths padded on the left.

    At batch 1 on a GPU it takes longer than all methods together.
    """

    is_timed_once = True

    def __init__(self, pair: Pair, batch: int) -> None:
        self._pair, self._batch = pair, batch
        set_greedy(pair.target.model, False)

    def decode(self, requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[Completion] | None]:
        target: Any = self._pair.target
        ids = encode(target.front_end, [request.prompt for request in requests])
        options = {"do_sample": False, "max_new_tokens": requests[0].sampling.max_new_tokens}
        engines_attention = target.model.config._attn_implementation
        target.model.set_attn_implementation("sdpa")
        try:
            outputs = generate_all(target.model, ids, self._batch, lambda _: options)
        finally:
            target.model.set_attn_implementation(engines_attention)
        return [tuple(output) for output in outputs], None
