"""Manages slots: sampling state per slot on the device, progress per request on the host."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decoding.constraints import Constraints
from decoding.contracts import PrefillOutput
from decoding.grammar import Matcher
from decoding.guidance import Guidance
from decoding.noise import Noise, key_of
from decoding.sampling import RowSampling
from decoding.scheduling.loops import LoopDetector
from decoding.scheduling.processors import ProcessorTables
from decoding.stats import Choices
from decoding.types import Completion, Request, Sampling, Telemetry
from models.backends.select import backend_for
from models.inputs.prefix import Prefix
from models.kv.lanes import SlotBatch


@dataclass
class RequestState:
    """State of one request in its slot."""

    request: Request
    prefix_length: int
    num_visual_tokens: int
    levels: int = 0
    """Maximum depth of the sample's next tree."""
    started_s: float = 0.0
    """Admission time by `time.perf_counter`."""
    unread: PrefillOutput | None = None
    """Input of the drafter's prefill; None after the prefill."""
    num_missed: int = 0
    """Number of steps without drafts, whose tokens the drafter must run before it drafts again."""
    drafter_error: str = ""
    """Error of the drafter's prefill; if set, the sample is decoded without drafts."""
    num_in_flight: int = 0
    """Upper bound of the number of tokens that steps in flight add."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""
    text: str | None = None
    telemetry: Telemetry = field(default_factory=Telemetry)
    histogram: list[int] = field(init=False)
    """Number of steps by accepted drafts."""
    batch_size_total: int = 0
    choices: Choices = field(default_factory=Choices)
    matcher: Matcher | None = field(init=False)
    """State of the request's grammar after `token_ids`."""
    loops: LoopDetector | None = field(init=False)
    """Detector of repetitions in `token_ids`; None if they end no text."""
    loop_start: int | None = None
    """Index of the first token of the repetition that ended the text."""

    def __post_init__(self) -> None:
        self.histogram = [0] * (self.levels + 1)
        self.matcher = None if self.request.grammar is None else self.request.grammar.start()
        sampling = self.request.sampling
        self.loops = LoopDetector(sampling.stop_loops, sampling.min_loop_tokens) if sampling.stop_loops else None

    @property
    def remaining(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.token_ids)

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], eos_ids: frozenset[int], decode: Callable[..., str]
    ) -> int:
        """Append tokens until the output ends; return the number of appended tokens."""
        sampling = self.request.sampling
        for num_kept, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), start=1):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            if self.matcher is not None:
                self.matcher.advance(token)
            loop = None if self.loops is None else self.loops.take(token)
            if token in eos_ids and not sampling.ignore_eos:
                self.finish_reason = "stop"
            elif sampling.stop and (cut := _cut_at_stop(decode(self.token_ids), sampling.stop)) is not None:
                self.finish_reason, self.text = "stop_string", cut
            elif loop is not None:
                self.finish_reason, self.loop_start = "looped", loop.start
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason:
                return num_kept
        return len(tokens)

    def completion(self, decode: Callable[..., str]) -> Completion:
        num_steps = self.telemetry.num_spec_steps
        batch_size_mean = self.batch_size_total / num_steps if num_steps else 0.0
        return Completion(
            sample_id=self.request.sample_id,
            token_ids=tuple(self.token_ids),
            text=decode(self.token_ids) if self.text is None else self.text,
            mean_logprob=sum(self.logprobs) / len(self.logprobs),
            finish_reason=self.finish_reason,
            loop_start=self.loop_start,
            attempt=self.request.attempt,
            num_input_tokens=self.prefix_length,
            num_visual_tokens=self.num_visual_tokens,
            telemetry=replace(
                self.telemetry, acceptance_histogram=tuple(self.histogram), batch_size_mean=batch_size_mean
            ),
        )


def _cut_at_stop(text: str, stop: Sequence[str]) -> str | None:
    positions = [position for position in (text.find(word) for word in stop) if position >= 0]
    return text[: min(positions)] if positions else None


class SlotTable:
    """State of all S slots: `progress` on the host; on the device, `root` (S,) pending tokens and other tensors.

    `eos_ids` are the tokens that end a text.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, eos_ids: frozenset[int] = frozenset()
    ) -> None:
        self.progress: list[RequestState | None] = [None] * num_slots
        self.vocab_size = vocab_size
        self.device = device
        self._backend = backend_for(device)
        integers = torch.zeros(num_slots, dtype=torch.long, device=device)
        floats = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.root, self._position, self._remaining = integers.clone(), integers.clone(), integers.clone()
        self._keys = torch.zeros(num_slots, 2, dtype=torch.long, device=device)
        self._temperature, self._top_p, self._penalty = floats.clone(), floats.clone(), floats.clone()
        self._top_k, self._min_p = integers.clone(), torch.zeros_like(floats)
        # Created by the first `stop_drafting`.
        self._is_plain: Tensor | None = None
        self.guidance = Guidance(self._position)
        self.constraints = Constraints(num_slots, vocab_size, device)
        self.processors = ProcessorTables(vocab_size, self._position, eos_ids)
        # (S, V) is large, so it is created for the first request with a repetition penalty.
        self._seen: Tensor | None = None
        # Cached, because the next batch usually has the same slots.
        self._index: tuple[tuple[int, ...], Tensor] | None = None
        self._padded: tuple[tuple[int, ...], SlotBatch] | None = None
        self._rows: tuple[tuple[int, ...], RowSampling] | None = None

    @property
    def free(self) -> list[int]:
        """Empty slots, lowest first, so that active slots tend to be contiguous."""
        return [slot for slot, progress in enumerate(self.progress) if progress is None]

    @property
    def active(self) -> list[int]:
        return [slot for slot, progress in enumerate(self.progress) if progress is not None]

    @property
    def unfinished(self) -> list[int]:
        """Slots that need another step even if all tokens in flight are kept."""
        return [slot for slot in self.active if self.at(slot).remaining > self.at(slot).num_in_flight]

    def batch(self, ids: Sequence[int]) -> SlotBatch:
        """Return the occupied slots `ids` as one batch."""
        ids = tuple(ids)
        counts = tuple(len(self.at(slot).token_ids) + self.at(slot).num_in_flight for slot in ids)
        if self._index is None or self._index[0] != ids:
            self._index = ids, self._backend.copy_to_device(ids, self.device)
        return SlotBatch(self._index[1], ids, counts)

    def padded(self, slots: SlotBatch, size: int) -> SlotBatch:
        """Return `slots` with spare ones, up to `size` slots; there are as many free slots."""
        ids = (*slots.ids, *self.free[: size - len(slots.ids)])
        assert len(ids) == size, (slots.ids, size)
        if self._padded is None or self._padded[0] != ids or self._padded[1].ids != slots.ids:
            index = self._backend.copy_to_device(ids, self.device)
            is_active = torch.arange(size, device=self.device) < len(slots.ids)
            self._padded = ids, SlotBatch(index, slots.ids, slots.num_generated, is_active)
        return replace(self._padded[1], num_generated=slots.num_generated)

    def at(self, slot: int) -> RequestState:
        progress = self.progress[slot]
        assert progress is not None, f"slot {slot} is empty"
        return progress

    def occupy(self, ids: Sequence[int], progress: Sequence[RequestState], prefixes: Sequence[Prefix]) -> None:
        """Assign new requests to the free slots `ids`."""
        self._rows = None
        self._make_seen([state.request.sampling for state in progress])
        for slot, state, prefix in zip(ids, progress, prefixes, strict=True):
            assert self.progress[slot] is None, f"slot {slot} is taken"
            self.progress[slot] = state
            sampling, request = state.request.sampling, state.request
            self._position[slot] = 0
            self._remaining[slot] = sampling.max_new_tokens
            key = key_of(request.seed, request.sample_id, request.replica, request.attempt)
            self._keys[slot] = torch.tensor(key)
            self._temperature[slot] = sampling.temperature
            self._top_k[slot] = sampling.top_k
            self._top_p[slot] = sampling.top_p
            self._min_p[slot] = sampling.min_p
            self._penalty[slot] = sampling.repetition_penalty
            self.guidance.occupy(slot, sampling)
            self.constraints.matchers[slot] = state.matcher
            self.processors.occupy(slot, sampling, prefix.token_ids)
            if self._seen is not None:
                # A prompt may have placeholder tokens that are not in the output layer.
                mask = self._seen.new_zeros(self.vocab_size + 1)
                mask[prefix.token_ids.clamp_max(self.vocab_size)] = True
                self._seen[slot] = mask[:-1]
            if self._is_plain is not None:
                self._is_plain[slot] = False

    def stop_drafting(self, slot: int, reason: str) -> None:
        """Decode the slot's sample without drafts from now on."""
        state = self.at(slot)
        state.levels, state.drafter_error, state.telemetry.degraded = 0, reason, True
        if self._is_plain is None:
            self._is_plain = torch.zeros_like(self.root, dtype=torch.bool)
        self._is_plain[slot] = True

    def release(self, slot: int) -> None:
        self.progress[slot] = None
        self.constraints.matchers[slot] = None

    def sampling(self, slots: SlotBatch) -> RowSampling:
        """Return the sampling parameters of the batch."""
        if self._rows is not None and self._rows[0] == slots.ids:
            return self._rows[1]
        rows = self.read_again(slots, self.rows_of([self.at(slot).request.sampling for slot in slots.ids]))
        if features := self.processors.features(slots, [len(self.at(slot).token_ids) for slot in slots.ids]):
            rows = replace(rows, processors=self.processors.read(slots, features))
        # Not cached if values change with every step.
        self._rows = None if rows.reads_path else (slots.ids, rows)
        return rows

    def rows_of(self, used: Sequence[Sampling]) -> RowSampling:
        """Return parameters of all slots with the features that rows with `used` need, processors excepted."""
        penalised = self._make_seen(used)
        return RowSampling(
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
            penalty=self._penalty,
            seen=self._seen if penalised else None,
            any_sampled=any(sampling.temperature > 0 for sampling in used),
            max_top_k=max((sampling.top_k for sampling in used if sampling.temperature > 0), default=0),
            any_top_p=any(sampling.top_p < 1.0 and sampling.temperature > 0 for sampling in used),
            min_p=self._min_p if any(sampling.min_p > 0 and sampling.temperature > 0 for sampling in used) else None,
        )

    def _make_seen(self, used: Sequence[Sampling]) -> bool:
        """Return whether any row has a repetition penalty; the first one creates the tokens that rows have seen."""
        penalised = any(sampling.repetition_penalty != 1.0 for sampling in used)
        if penalised and self._seen is None:
            self._seen = torch.zeros(len(self.progress), self.vocab_size, dtype=torch.bool, device=self.device)
        return penalised

    def read_again(self, slots: SlotBatch, rows: RowSampling) -> RowSampling:
        """Return `rows` with parameters that kernels read anew from the table."""
        index, processors = slots.index, rows.processors
        return replace(
            rows,
            temperature=self._temperature[index],
            top_k=self._top_k[index],
            top_p=self._top_p[index],
            penalty=self._penalty[index],
            seen=None if rows.seen is None or self._seen is None else self._seen[index],
            min_p=None if rows.min_p is None else self._min_p[index],
            processors=None if processors is None else self.processors.read(slots, processors.features),
        )

    def replay_key(self) -> Hashable:
        """Return the host state that the kernels of a step depend on."""
        return self._is_plain is None, self._seen is None, self.processors.replay_key()

    def noise(self, slots: SlotBatch) -> Noise:
        """Return the noise of the batch from each sample's next position on."""
        return Noise(slots.of(self._keys), slots.of(self._position))

    def max_depth(self, slots: SlotBatch) -> Tensor:
        """Return the depth (b,) of each row's deepest useful draft, 0 for rows that have all their tokens; the last
        token of an output is never a draft."""
        deepest = slots.counted(slots.of(self._remaining) - 1).clamp_min(0)
        return deepest if self._is_plain is None else deepest.masked_fill(slots.of(self._is_plain), 0)

    def advance(self, slots: SlotBatch, tokens: Tensor, count: Tensor) -> None:
        """Advance by the first `count` (b,) tokens of `tokens` (b, P); the last of these becomes the pending token."""
        index = slots.index
        self.processors.advance(slots, tokens, count)
        slots.put(self.root, tokens.gather(1, (count - 1)[:, None])[:, 0])
        slots.add(self._position, count)
        slots.add(self._remaining, count, sign=-1)
        if self._seen is not None:
            real = torch.arange(tokens.shape[1], device=tokens.device)[None] < count[:, None]
            rows = index[:, None].expand_as(tokens)
            # Positions beyond the count repeat the first token, so that the write needs no mask.
            indices = rows, torch.where(real, tokens, tokens[:, :1])
            self._seen.index_put_(indices, torch.ones((), dtype=torch.bool, device=tokens.device))
