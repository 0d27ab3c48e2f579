"""The one loop: admit → draft → verify → accept → commit, batched, with slots refilled as they fall free.

Plain decoding is this loop with the drafter `none`; every method is this loop with other parts. Knows the contracts of
`decoding.contracts` and nothing of what stands behind them; knows no Ray and no files.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from decoding.contracts import EngineSpec, Method, Probe, StepNoise
from decoding.errors import non_finite_logits, row_timeout
from decoding.noise import Stream
from decoding.sampling import perturb, warp
from decoding.scheduling.admission import MAX_PREFILL_TOKENS, Admission
from decoding.scheduling.drafter_prefill import DrafterPrompts
from decoding.scheduling.in_flight import InFlight
from decoding.scheduling.slots import Progress, SlotTable
from decoding.stats import EngineStats, RequestStats
from decoding.step import run_step
from decoding.types import Completion, Request
from models.contract import TargetModel
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch


class Engine:
    """Runs requests through a target with one method.

    `slots` samples are decoded at once; `max_context_tokens` bounds prompt, images and output together, `max_row_s` the
    time of one sample in its slot (None for ever), `max_prefill_tokens` the columns of one forward over prompts, with
    padding, unless one prompt alone has more. With `reads_late` a step is looked at when the next one was launched, so
    that a device never waits for the host; a row that has ended runs once more for it. None is yes on a GPU, and no
    where the host itself computes. One thread may use an engine at a time.
    """

    def __init__(
        self,
        target: TargetModel,
        method: Method,
        slots: int = 16,
        max_context_tokens: int = 2048,
        max_row_s: float | None = None,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        reads_late: bool | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        self.target = target
        self.method = method
        self.max_context_tokens = max_context_tokens
        self.max_row_s = max_row_s
        self.stats = EngineStats()
        self._lanes = target.lanes(slots, target.num_lanes, max_context_tokens + method.tree.max_nodes)
        self._slots = SlotTable(slots, target.vocab_size, target.device)
        self._admission = Admission(target, max_context_tokens, max_prefill_tokens)
        self._queue = self._admission.queue
        self._max_prefill_tokens = max_prefill_tokens
        self._reads_late = target.device.type != "cpu" if reads_late is None else reads_late
        self._flying: InFlight | None = None
        self._looked_s = 0.0
        is_timed = method.controller.can_be_off
        self._prompts = DrafterPrompts(method.drafter, self._admission, target.device, is_timed)
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
        )
        method.drafter.open(spec)
        method.tree.open(spec)
        method.acceptance.open(spec)
        self._needs_hidden = method.drafter.needs_hidden or method.acceptance.needs_hidden
        self._needs_attention = method.drafter.needs_attention
        # In half precision the last bits of a row depend on kernels and batches.
        self._names_kernels = target.dtype in (torch.bfloat16, torch.float16)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or in a slot."""
        return bool(self._queue.num_waiting or self._slots.active or self._flying)

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return self._queue.num_waiting

    @property
    def num_free_slots(self) -> int:
        """Slots that neither a running nor a waiting request will take."""
        return max(0, len(self._slots.free) - self._queue.num_waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; it is admitted by the next `step` with a free slot."""
        self._queue.submit(request)

    def expect(self, requests: Iterable[Request]) -> None:
        """Name the requests that will be submitted next, in their order: where the target makes prompts on a thread of
        its own, theirs are begun. Nothing else follows from it, and whoever is named may never come."""
        self._admission.expect(requests)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode requests, yielding completions as they finish, not in input order; read as slots fall free."""
        source = iter(requests)
        num_ahead = len(self._slots.progress) if self.target.prompt_thread is not None else 0
        coming: deque[Request] = deque()
        while True:
            coming.extend(islice(source, max(0, self.num_free_slots + num_ahead - len(coming))))
            while coming and self.num_free_slots > 0:
                self.submit(coming.popleft())
            if not self.has_work:
                return
            self.expect(coming)
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Admit what fits, then draft and verify once; returns the requests that finished, errors included. Where steps
        are read late, those are the ones that the step before finished."""
        self._admission.prefetch()
        finished = self._admit()
        ended, launched = self._launch()
        finished += ended + self._land_all()
        if self._reads_late:
            self._flying = launched
        elif launched is not None:
            finished += self._land(launched)
        self.stats.num_finished += len(finished)
        return finished

    # --- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> list[Completion]:
        """Fill the free slots before anything is decoded, a bounded number of prompts after the other: every further
        step is then taken by all, and what admitting needs beside weights and memory does not grow with the slots."""
        finished: list[Completion] = []
        free = self._slots.free
        while self._queue.num_waiting and free:
            taken = self._admission.take(len(free), waits=not (self._slots.active or finished))
            self.stats.encode_s += time.perf_counter() - taken.started_s
            self.stats.num_feature_hits += taken.num_feature_hits
            self.stats.num_shared_prompts += len(taken.lanes) - len({id(lanes) for lanes in taken.lanes})
            if not (taken.requests or taken.refused):
                break
            # Prompts are made while the device goes on, and read when it has nothing else to do.
            finished += taken.refused + self._land_all(is_late=True)
            ids, free = free[: len(taken.requests)], free[len(taken.requests) :]
            if ids:
                progress = [self._begin(*one, taken.started_s) for one in zip(taken.requests, taken.lanes, strict=True)]
                self._slots.occupy(ids, progress, [lanes[0] for lanes in taken.lanes])
                finished += self._prefill(self._slots.batch(ids), progress, taken.lanes)
        return finished

    def _begin(self, request: Request, lanes: list[Prefix], started_s: float) -> Progress:
        levels = self.method.tree.max_levels if self._drafts else 0
        num_visual = int(lanes[0].visual.sum())
        return Progress(request, lanes[0].num_kept, num_visual, RequestStats(levels), started_s, levels)

    def _prefill(self, slots: SlotBatch, progress: list[Progress], prefixes: list[list[Prefix]]) -> list[Completion]:
        """Run the target over fresh prompts and take each sample's first token; then admit those that go on."""
        start = time.perf_counter()
        options = (self._needs_attention, self._needs_hidden, self._max_prefill_tokens)
        prefill = self._lanes.admit(slots, prefixes, *options)
        ends = torch.zeros_like(slots.index)[:, None]
        raw = self._slots.guidance.merge(slots, self._lanes.logits(prefill.last)[:, :, None], ends)  # (b, 1, V)
        rows = self._slots.sampling(slots)
        draws = None
        if rows.any_sampled:
            draws = StepNoise(self._slots.noise(slots), 1, self.target.vocab_size).gumbel(Stream.TOKEN)
        first = perturb(warp(raw, rows, None), draws, rows).argmax(dim=-1)
        logprobs = raw.gather(-1, first[:, :, None])[..., 0] - raw.logsumexp(dim=-1)
        self._slots.advance(slots, first, torch.ones_like(first[:, 0]))
        self.stats.target_forwards += prefill.num_forwards
        self.stats.num_admitted += len(progress)
        tokens, values = first.tolist(), logprobs.tolist()
        finished: list[Completion] = []
        going: list[tuple[int, Progress, Probe]] = []
        probes: dict[int, tuple[Probe, Probe]] = {}
        for row, (slot, one) in enumerate(zip(slots.ids, progress, strict=True)):
            one.stats.target_forwards = 1
            one.take(tokens[row], values[row], self.target.eos_ids, self.target.decode)
            ended = self._collect(slot, one, values[row])
            finished += ended
            if not ended:
                # Samples of one prompt have one probe.
                key = id(prefixes[row])
                if key not in probes:
                    hidden = prefill.hidden_of(row) if self._needs_hidden else None
                    probe = Probe(prefixes[row][0], hidden, prefill.attention_of(row * self.target.num_lanes))
                    probes[key] = probe, probe.outline()
                probe, one.unread = probes[key]
                going.append((slot, one, probe))
        if going:
            admitted = self._slots.batch([slot for slot, *_ in going])
            found = [probe for *_, probe in going]
            self.method.drafter.admit(admitted, self._slots.root[admitted.index], found)
            self.method.tree.reset(admitted)
            self.method.acceptance.admit(admitted, found)
        spent = time.perf_counter() - start
        self.stats.prefill_s += spent
        for one in progress:
            one.stats.prefill_ms = 1000 * spent / len(progress)
        if going and not self.method.controller.is_off:
            # Otherwise a sample that ends before drafting begins again never has its prompt read.
            self._read(admitted, [one for _, one, _ in going])
        return finished

    def _read(self, slots: SlotBatch, progress: list[Progress]) -> None:
        """Have the drafter read what it has not read of these prompts; nothing is drafted for those that it cannot."""
        spent, failed = self._prompts.read(slots, progress)
        self.stats.prefill_s += spent
        for slot, reason in failed.items():
            self._slots.stop_drafting(slot, reason)

    def _collect(self, slot: int, one: Progress, new_logprobs: list[float]) -> list[Completion]:
        """Release the slot if its request is done."""
        if not all(math.isfinite(value) for value in new_logprobs):
            self._slots.release(slot)
            return [one.failure(non_finite_logits())]
        if not one.finish_reason:
            return []
        self._slots.release(slot)
        self.stats.num_generated_tokens += len(one.token_ids)
        one.stats.extras = self.method.drafter.extras(slot) | self.method.tree.extras(slot) | one.stats.choices.extras()
        if self._names_kernels:
            one.stats.extras["kernels"] = self.target.kernels
        if one.why_plain:
            one.stats.extras["drafter_error"] = one.why_plain
        return [one.completion(self.target.decode)]

    # --- decoding --------------------------------------------------------------------------------------------------

    def _launch(self) -> tuple[list[Completion], InFlight | None]:
        """Hand the device a step of every slot whose text goes on as far as the host knows; None where there is none.
        If it had to look, also who has ended."""
        finished: list[Completion] = []
        ids = self._slots.going
        if not ids:
            return finished, None
        progress = [self._slots.at(slot) for slot in ids]
        most = max(min(one.levels, one.remaining - 1) for one in progress)
        num_missed = sum(one.num_missed for one in progress)
        num_unread = sum(one.prefix_length for one in progress if one.unread is not None)
        choice = self.method.controller.choose(len(ids), most, num_missed, num_unread)
        if choice.levels and num_unread:
            # Requests that have ended need no prompt read.
            finished += self._land_all()
            ids = self._slots.going
            if not ids:
                return finished, None
            progress = [self._slots.at(slot) for slot in ids]
            self._read(self._slots.batch(ids), progress)
            if all(one.why_plain for one in progress):
                choice = self.method.controller.choose(len(ids), 0, 0, 0)
        slots = self._slots.batch(ids)
        before = self.method.drafter.num_forwards
        result = run_step(self.method, self._lanes, self._slots, slots, self._slots.sampling(slots), choice.levels)
        forwards = self.method.drafter.num_forwards - before
        missed = num_missed if choice.levels else 0
        sent = result.send()
        launched = InFlight(slots, progress, choice, missed, forwards, result, sent, time.perf_counter())
        launched.note()
        return finished, launched

    def _land_all(self, is_late: bool = False) -> list[Completion]:
        """Look at the step in flight, if there is one."""
        flying, self._flying = self._flying, None
        return [] if flying is None else self._land(flying, is_late)

    def _land(self, flight: InFlight, is_late: bool = False) -> list[Completion]:
        """Look at a step: the host's side of it, for the rows that have not ended before. A look that `is_late` says
        little of how long the step took."""
        look = flight.look(self._looked_s)
        step, self._looked_s = look.step, look.ended_s
        flight.count_step(self.stats, look)
        finished: list[Completion] = []
        offered: list[int] = []
        ended_prompts: list[int] = []
        for row, (slot, one) in enumerate(zip(flight.slots.ids, flight.progress, strict=True)):
            has_ended = self._slots.progress[slot] is not one
            is_offered = not (has_ended or one.why_plain)
            offered.append(min(flight.choice.levels, one.remaining - 1) if is_offered else 0)
            if has_ended:
                continue
            one.num_ahead -= flight.choice.levels + 1
            n = step.counts[row]
            new_logprobs = step.logprobs[row][:n]
            kept = one.take(step.tokens[row][:n], new_logprobs, self.target.eos_ids, self.target.decode)
            flight.count(row, look, kept)
            if step.levels is not None and self._drafts:
                one.levels = 0 if one.why_plain else step.levels[row]
                # The next trees' depth follows from this step: nothing is gained by launching them without it.
                self._reads_late = False
            done = self._collect(slot, one, new_logprobs[:kept])
            if not done and self.max_row_s is not None and look.ended_s - one.started_s > self.max_row_s:
                self._slots.release(slot)
                done = [one.failure(row_timeout(self.max_row_s, len(one.token_ids)))]
            finished += done
            if done:
                ended_prompts.append(one.prefix_length)
        outcome = flight.outcome(look, offered, self._prompts.take_reading(), ended_prompts, is_late)
        self.method.controller.learn(outcome, flight.choice)
        return finished
