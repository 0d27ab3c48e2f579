"""Runs the engine loop: admit, draft, verify, accept and commit in batches, and refill slots as they become free.

Plain decoding uses the drafter `none`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from decoding.contracts import EngineSpec, Method, PrefillOutput, StepNoise
from decoding.controllers.base import StepOutcome
from decoding.errors import GRAMMAR_FAILED, NON_FINITE_LOGITS, ROW_TIMEOUT, failed
from decoding.noise import Stream
from decoding.sampling import perturb, process_logits
from decoding.scheduling.admission import MAX_PREFILL_TOKENS, Admission, Refill
from decoding.scheduling.drafter_prefill import DrafterPrefill
from decoding.scheduling.replay import StepRunner
from decoding.scheduling.slots import RequestState, SlotTable
from decoding.stats import EngineStats
from decoding.step import StepInFlight
from decoding.types import Completion, Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch


class Engine:
    """Decodes requests with one target and one method.

    `slots` is the maximum number of samples decoded at once. `max_context_tokens` limits prompt, images and output of a
    sample, `max_row_s` its seconds in the slot (None: no limit), `max_prefill_tokens` the padded tokens of one prefill
    forward; a longer prompt runs alone. `async_output` enables asynchronous output processing: the output of a step is
    processed after the next step was launched; None enables it on accelerators. With `num_pages`, samples share that
    many pages of the target's KV cache, and wait for them; otherwise each slot has `max_context_tokens` positions. Not
    thread-safe.
    """

    def __init__(
        self,
        target: TargetModel,
        method: Method,
        slots: int = 16,
        max_context_tokens: int = 2048,
        max_row_s: float | None = None,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        async_output: bool | None = None,
        num_pages: int | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        if target.max_context_tokens is not None and max_context_tokens > target.max_context_tokens:
            raise ValueError(f"{target.name} was loaded for contexts up to {target.max_context_tokens} tokens")
        self.target, self.method = target, method
        self.max_context_tokens = max_context_tokens
        self.max_row_s = max_row_s
        self.stats = EngineStats()
        layers = method.drafter.feature_layers
        num_scratch = method.tree.num_scratch(method.drafter.shares_cache)
        capacity = max_context_tokens + num_scratch
        self._lanes = target.lanes(slots, target.num_lanes, capacity, layers, num_pages)
        self._lanes.check_siblings(method.tree.max_siblings, target.name)
        self._slots = SlotTable(slots, target.vocab_size, target.device, target.eos_ids)
        limits = max_context_tokens, max_prefill_tokens
        self._admission = Admission(target, *limits, self._lanes.rows, num_scratch)
        self._queue = self._admission.queue
        self._refill = Refill(slots, target.backend.prefill_steps)
        self._max_prefill_tokens = max_prefill_tokens
        self._async_output = target.backend.is_asynchronous if async_output is None else async_output
        self._in_flight: StepInFlight | None = None
        self._last_output_s = 0.0
        is_timed = method.controller.can_be_off
        self._drafter_prefill = DrafterPrefill(method.drafter, self._admission, target.device, is_timed)
        self._drafts = method.drafter.name != "none"
        spec = EngineSpec(
            num_slots=slots,
            max_context_tokens=max_context_tokens,
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            device=target.device,
            eos_ids=target.eos_ids,
            special_ids=target.special_ids,
            max_frontier_nodes=method.tree.max_frontier_nodes,
            max_grown_nodes=method.tree.max_grown_nodes,
            max_levels=method.tree.max_levels,
            token_embeddings=target.decoder.get_input_embeddings().weight,  # type: ignore[operator]
            num_lanes=target.num_lanes,
            guidance=self._slots.guidance,
            max_missed_tokens=max_context_tokens if method.controller.can_be_off else 0,
            max_prefill_tokens=max_prefill_tokens,
            lanes=self._lanes,
            constraints=self._slots.constraints,
            max_siblings=method.tree.max_siblings,
        )
        method.drafter.open(spec)
        method.tree.open(spec)
        method.acceptance.open(spec)
        self._runner = StepRunner(self._lanes, self._slots, method)
        self._needs_hidden, self._needs_features = method.acceptance.needs_hidden, bool(layers)
        self._needs_attention = method.drafter.needs_attention
        # In half precision, results depend on kernels and batch sizes.
        self._names_kernels = target.dtype in (torch.bfloat16, torch.float16)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._queue.num_waiting or self._slots.active or self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Number of submitted requests without a slot."""
        return self._queue.num_waiting

    @property
    def num_free_slots(self) -> int:
        """Number of free slots minus waiting requests, at least 0."""
        return max(0, len(self._slots.free) - self._queue.num_waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; the next `step` with a free slot admits it."""
        self._queue.submit(request)

    def expect(self, requests: Iterable[Request]) -> None:
        """Set the requests that will probably be submitted next, in order, to prefetch their prompts."""
        self._admission.expect(requests)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode requests and yield completions as they finish; read from `requests` as slots become free."""
        source = iter(requests)
        num_prefetched = len(self._slots.progress) if self.target.prompt_thread is not None else 0
        upcoming: deque[Request] = deque()
        while True:
            upcoming.extend(islice(source, max(0, self.num_free_slots + num_prefetched - len(upcoming))))
            while upcoming and self.num_free_slots > 0:
                self.submit(upcoming.popleft())
            if not self.has_work:
                return
            self.expect(upcoming)
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit requests, then draft and verify once; return requests that finished, with asynchronous output
        processing those of the previous step."""
        self._admission.prefetch()
        if self._runner.records_ahead and self._queue.num_waiting:
            first = islice(self._queue.waiting(), len(self._slots.free))
            self._runner.record_ahead(self.method, [request.sampling for request in first])
        finished = self._admit()
        ended, launched = self._launch()
        finished += ended + self._process_in_flight()
        if self._async_output:
            self._in_flight = launched
        elif launched is not None:
            finished += self._process(launched)
        return finished

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Completion]:
        """Fill the free slots in batches of limited prompt tokens, so that prefill memory is bounded.

        While slots decode, only prompts that are ready are admitted; the others are encoded during the prefill.
        """
        finished: list[Completion] = []
        free, has_active = self._slots.free, bool(self._slots.active)
        num_ready = self._admission.num_ready(len(free)) if has_active else self._queue.num_waiting
        if not self._refill.is_due(len(free), num_ready, has_active):
            return finished
        while self._queue.num_waiting and free:
            taken = self._admission.take(len(free), waits=not (self._slots.active or finished))
            self._admission.prefetch()
            self.stats.encode_s += time.perf_counter() - taken.started_s
            self.stats.num_feature_hits += taken.num_feature_hits
            if not (taken.requests or taken.refused):
                break
            # Encoding overlaps with the step in flight; its output is processed before the prefill.
            finished += taken.refused + self._process_in_flight(is_late=True)
            ids, free = free[: len(taken.requests)], free[len(taken.requests) :]
            self._refill.done(len(free))
            if ids:
                levels = self.method.tree.max_levels if self._drafts else 0
                progress = [
                    RequestState(request, lanes[0].num_kept, int(lanes[0].visual.sum()), levels, taken.started_s)
                    for request, lanes in zip(taken.requests, taken.lanes, strict=True)
                ]
                self._slots.occupy(ids, progress, [lanes[0] for lanes in taken.lanes])
                slots = self._slots.batch(ids)
                self._lanes.rows.assign(slots, taken.pages)
                finished += self._prefill(slots, progress, taken.lanes)
        return finished

    def _prefill(
        self, slots: SlotBatch, progress: list[RequestState], prefixes: list[list[Prefix]]
    ) -> list[Completion]:
        """Prefill the target, sample first tokens, and admit unfinished samples to the parts of the method."""
        start = time.perf_counter()
        options = (self._needs_attention, self._needs_hidden or self._needs_features, self._max_prefill_tokens)
        prefill = self._lanes.admit(slots, prefixes, *options)
        ends = torch.zeros_like(slots.index)[:, None]
        merged = self._slots.guidance.merge(slots, self._lanes.logits(prefill.last)[:, :, None], ends)  # (b, 1, V)
        target_logits = self._slots.constraints.apply(slots, merged)
        rows = self._slots.sampling(slots)
        draws = None
        if rows.any_sampled:
            draws = StepNoise(self._slots.noise(slots), 1, self.target.vocab_size).gumbel(Stream.TOKEN)
        first = perturb(process_logits(target_logits, rows), draws, rows).argmax(dim=-1)
        logprobs = merged.gather(-1, first[:, :, None])[..., 0] - merged.logsumexp(dim=-1)
        self._slots.advance(slots, first, torch.ones_like(first[:, 0]))
        self.stats.target_forwards += prefill.num_forwards
        self.stats.num_admitted += len(progress)
        tokens, values = first.tolist(), logprobs.tolist()
        finished: list[Completion] = []
        continued: list[tuple[int, RequestState, PrefillOutput]] = []
        prefill_outputs: dict[int, tuple[PrefillOutput, PrefillOutput]] = {}
        for row, (slot, state) in enumerate(zip(slots.ids, progress, strict=True)):
            state.telemetry.target_forwards = 1
            state.take(tokens[row], values[row], self.target.eos_ids, self.target.decode)
            ended = self._collect(slot, state, values[row])
            finished += ended
            if not ended:
                # Samples with equal prompts share one prefill output.
                key = id(prefixes[row])
                if key not in prefill_outputs:
                    hidden = prefill.hidden_of(row) if self._needs_hidden else None
                    features = prefill.features_of(row) if self._needs_features else None
                    attention = prefill.attention_of(row * self.target.num_lanes)
                    prefill_output = PrefillOutput(prefixes[row][0], hidden, attention, features)
                    prefill_outputs[key] = prefill_output, prefill_output.outline()
                prefill_output, state.unread = prefill_outputs[key]
                continued.append((slot, state, prefill_output))
        if continued:
            admitted = self._slots.batch([slot for slot, *_ in continued])
            outputs = [prefill_output for *_, prefill_output in continued]
            self.method.drafter.admit(admitted, self._slots.root[admitted.index], outputs)
            self.method.tree.reset(admitted)
            self.method.acceptance.admit(admitted, outputs)
        spent = time.perf_counter() - start
        self.stats.prefill_s += spent
        for state in progress:
            state.telemetry.prefill_ms = 1000 * spent / len(progress)
        if continued and not self.method.controller.is_off:
            # While drafting is off, the prefill is deferred, so samples that finish before drafting resumes skip it.
            self._prefill_drafter(admitted, [state for _, state, _ in continued])
        return finished

    def _prefill_drafter(self, slots: SlotBatch, progress: list[RequestState]) -> None:
        """Prefill the drafter; stop drafting for samples whose prefill fails."""
        spent, errors = self._drafter_prefill.prefill(slots, progress)
        self.stats.prefill_s += spent
        for slot, reason in errors.items():
            self._slots.stop_drafting(slot, reason)

    def _collect(self, slot: int, state: RequestState, new_logprobs: list[float]) -> list[Completion]:
        """Release the slot and return the completion if the request finished or a new log probability is not finite."""
        if not all(map(math.isfinite, new_logprobs)):
            self._release(slot)
            message = "the target's logits are not finite for this sample; try another dtype"
            return [failed(state.request.sample_id, NON_FINITE_LOGITS, message)]
        if state.matcher is not None and state.matcher.error:
            self._release(slot)
            message = f"after {len(state.token_ids)} tokens: {state.matcher.error}"
            return [failed(state.request.sample_id, GRAMMAR_FAILED, message)]
        if not state.finish_reason:
            return []
        self._release(slot)
        self.stats.num_generated_tokens += len(state.token_ids)
        self.method.drafter.finished(state.token_ids)
        extras = self.method.drafter.extras(slot) | self.method.tree.extras(slot) | state.choices.extras()
        if self._names_kernels:
            extras["kernels"] = self.target.kernels
        if state.drafter_error:
            extras["drafter_error"] = state.drafter_error
        state.telemetry.extras = extras
        return [state.completion(self.target.decode)]

    def _release(self, slot: int) -> None:
        self._slots.release(slot)
        self._lanes.rows.release(slot)

    # --- decoding --------------------------------------------------------------------------------------------------

    def _launch(self) -> tuple[list[Completion], StepInFlight | None]:
        """Launch a step of all unfinished slots, if any. Also return requests that finished in the step in flight."""
        finished: list[Completion] = []
        if self._slots.constraints.applies(self._slots.active):
            # Masks depend on the tokens of the step in flight.
            finished += self._process_in_flight()
        if not (ids := self._step_ids()):
            return finished, None
        progress = [self._slots.at(slot) for slot in ids]
        most = max(min(state.levels, state.remaining - 1) for state in progress)
        num_missed = sum(state.num_missed for state in progress)
        num_unread = sum(state.prefix_length for state in progress if state.unread is not None)
        choice = self.method.controller.choose(len(ids), most, num_missed, num_unread)
        if choice.levels and num_unread:
            # Requests that have finished need no drafter prefill.
            finished += self._process_in_flight()
            if not (ids := self._step_ids()):
                return finished, None
            progress = [self._slots.at(slot) for slot in ids]
            self._prefill_drafter(self._slots.batch(ids), progress)
            if all(state.drafter_error for state in progress):
                choice = self.method.controller.choose(len(ids), 0, 0, 0)
        slots = self._slots.batch(ids)
        before = self.method.drafter.num_forwards
        result = self._runner.run(self.method, slots, self._slots.sampling(slots), choice.levels)
        forwards = self.method.drafter.num_forwards - before
        missed = num_missed if choice.levels else 0
        copy = self._lanes.backend.copy_to_host(result.output, result.packed)  # the step's only copy
        launched = StepInFlight(slots, progress, choice, missed, forwards, result, copy, time.perf_counter())
        launched.record_launch()
        return finished, launched

    def _step_ids(self) -> list[int]:
        """Return the slots of the next step, none if all requests finish with the step in flight. A step of a fixed
        size includes slots that may finish."""
        unfinished = self._slots.unfinished
        return self._slots.active if unfinished and self._runner.recorder is not None else unfinished

    def _process_in_flight(self, is_late: bool = False) -> list[Completion]:
        """Process the output of the step in flight, if any."""
        in_flight, self._in_flight = self._in_flight, None
        return [] if in_flight is None else self._process(in_flight, is_late)

    def _process(self, launched: StepInFlight, is_late: bool = False) -> list[Completion]:
        """Process a step's output for rows that had not finished before; `is_late` marks its time as an upper bound."""
        step = launched.wait(self._last_output_s)
        self._last_output_s = launched.ended_s
        launched.count_step(self.stats)
        finished: list[Completion] = []
        offered: list[int] = []
        ended_prompts: list[int] = []
        for row, (slot, state) in enumerate(zip(launched.slots.ids, launched.progress, strict=True)):
            has_ended = self._slots.progress[slot] is not state
            is_offered = not (has_ended or state.drafter_error)
            offered.append(min(launched.choice.levels, state.remaining - 1) if is_offered else 0)
            if has_ended:
                continue
            state.num_in_flight -= launched.choice.levels + 1
            n = step.counts[row]
            new_logprobs = step.logprobs[row][:n]
            num_kept = state.take(step.tokens[row][:n], new_logprobs, self.target.eos_ids, self.target.decode)
            launched.count(row, step, num_kept)
            if step.levels is not None and self._drafts:
                state.levels = 0 if state.drafter_error else step.levels[row]
                # The next trees' depth depends on this step, so launching early gains nothing.
                self._async_output = False
            done = self._collect(slot, state, new_logprobs[:num_kept])
            if not done and self.max_row_s is not None and launched.ended_s - state.started_s > self.max_row_s:
                self._release(slot)
                # The tokens are dropped, because their number depends on the machine's speed.
                num_tokens, limit = len(state.token_ids), f"pool.max_row_s ({self.max_row_s:g} s)"
                message = f"{num_tokens} tokens after more than {limit}; none of them are kept"
                done = [failed(state.request.sample_id, ROW_TIMEOUT, message)]
            finished += done
            if done:
                ended_prompts.append(state.prefix_length)
        outcome = StepOutcome(
            levels=launched.choice.levels,
            seconds=launched.seconds,
            accepted=[n - 1 for n in step.counts[: len(offered)]],
            offered=offered,
            num_missed=launched.num_missed,
            prefill=self._drafter_prefill.take_prefill_time(),
            ended=ended_prompts,
            is_late=is_late or launched.result.is_warm_up,
        )
        self.method.controller.learn(outcome, launched.choice)
        return finished
