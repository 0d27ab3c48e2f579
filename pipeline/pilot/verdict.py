"""Judges from a pilot whether speculation pays: where the time goes, the ceiling, each method's speed-up.

The pilot decodes blocks of rows with plain decoding and with every configured method in turns, by the trial of
`method.auto` (`actors.auto.trial`). The ceiling is Amdahl's law for decoding that takes no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from actors.auto.trial import MAX_LONGER, block_rows
from actors.results import CandidateResult, TrialResult
from configs.drafters import NoDrafterConfig
from configs.method import AutoMethodConfig, MethodConfig
from configs.pool import EnginePoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from pipeline.reports.intervals import mean_interval

MIN_ROUNDS, MAX_ROUNDS = 4, 12
"""Rounds of the pilot's trial. The first one warms up compilers and caches; the others give the intervals."""
NONE = "none"


@dataclass(frozen=True)
class Range:
    """A value and its confidence interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.value * factor, self.low * factor, self.high * factor)

    def times_range(self, other: Range) -> Range:
        """Return the product with an independent value; relative half-widths add in quadrature."""
        value = self.value * other.value
        if not value:
            return Range(0.0, 0.0, 0.0)
        below = math.hypot(1 - self.low / self.value, 1 - other.low / other.value)
        above = math.hypot(self.high / self.value - 1, other.high / other.value - 1)
        return Range(value, value * max(0.0, 1 - below), value * (1 + above))

    def shown(self, unit: str = "", digits: int = 2) -> str:
        """Format the value with its interval, if that is not empty."""
        text = f"{self.value:,.{digits}f}"
        if self.high - self.low > 1e-9 * abs(self.value):
            text += f" ({self.low:,.{digits}f} to {self.high:,.{digits}f})"
        return f"{text} {unit}".rstrip()


def mean_of(values: Sequence[float]) -> Range:
    """Return the mean of independent values with Student's 95 % interval, infinitely wide for one value."""
    interval = mean_interval(values)
    return Range(interval.value, interval.low, interval.high)


def pilot_method(method: MethodConfig, slots: int | None = None, num_rows: int = 0) -> MethodConfig:
    """Return the trial of plain decoding and the configured methods, with as many rounds as `num_rows` rows in `slots`
    slots suffice for if all blocks have their most rows. A lossy method is tried too: the pilot's rows are not part of
    the output."""
    configured = () if isinstance(method.drafter, NoDrafterConfig) and method.auto is None else (method,)
    candidates = configured if method.auto is None else method.auto.candidates
    num_rounds = MIN_ROUNDS
    if slots is not None:
        num_rounds = num_rows // (MAX_LONGER * (len(candidates) + 1) * block_rows(slots))
        num_rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, num_rounds))
    auto = AutoMethodConfig.model_construct(
        candidates=candidates, min_rounds=MIN_ROUNDS, max_rounds=num_rounds, max_rechecks=0
    )
    return method.model_copy(update={"auto": auto})


def pilot_pool(pool: EnginePoolConfig, threads: int | None) -> EnginePoolConfig:
    """Return the pool of a pilot: one engine, which sees enough rows for a trial."""
    return pool.model_copy(update={"min_size": 1, "max_size": 1, "initial_size": None, "torch_threads": threads})


def needed_rows(method: MethodConfig, pool: EnginePoolConfig) -> int | None:
    """Return the least rows of a pilot with a verdict, if outputs are not short; None if `pool.slots` is auto."""
    if pool.slots == "auto":
        return None
    return MIN_ROUNDS * len(pilot_method(method).methods) * block_rows(pool.slots)


@dataclass(frozen=True)
class MethodResult:
    """One method in the pilot; intervals are None if it was not measured often enough."""

    method: str
    lossless: bool
    row_s: Range | None
    """Engine seconds per row, at full slots."""
    speedup: Range | None
    """Over plain decoding."""
    acceptance_length: float
    note: str
    device_hours: Range | None = None
    cost: Range | None = None


@dataclass(frozen=True)
class PilotVerdict:
    """Times are engine seconds per row of plain decoding, except `media_s`, which is core seconds of decoding tasks."""

    encode_s: Range
    prefill_s: Range
    decode_s: Range
    decode_share: Range
    ceiling: Range
    """Speed-up over plain decoding if decoding took no time."""
    methods: tuple[MethodResult, ...]
    recommended: str
    """Name of a method, or `NONE`."""
    reason: str
    encoding: str
    media_s: float | None = None
    actors_waited: float = 0.0
    """Share of time in which the pilot's engine waited for input."""

    def with_hours(self, num_rows: float, spread: Range, devices: float, price_per_hour: float | None) -> PilotVerdict:
        """Return the verdict with device hours and costs of `num_rows` rows. `spread` is the relative uncertainty of
        the job's engine time, because the spans of the source differ."""

        def priced(result: MethodResult) -> MethodResult:
            if result.row_s is None:
                return result
            hours = result.row_s.times_range(spread).times(num_rows * devices / 3600)
            cost = None if price_per_hour is None else hours.times(price_per_hour)
            return replace(result, device_hours=hours, cost=cost)

        return replace(self, methods=tuple(map(priced, self.methods)))

    @property
    def fastest(self) -> str:
        """The method with the least time per row, which `method.auto` keeps."""
        return min(self.methods, key=lambda result: result.row_s.value if result.row_s else math.inf).method

    def result_of(self, method: str) -> MethodResult | None:
        """Return a method's result; None if it was not measured."""
        return next((result for result in self.methods if result.method == method and result.row_s is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; infinite limits of intervals are None."""
        return dict(finite(asdict(self)))

    def lines(self) -> list[str]:
        """Return the verdict as lines of text."""
        total_s = self.encode_s.value + self.prefill_s.value + self.decode_s.value
        lines = ["where the time goes (engine time per row, plain decoding)"]
        for label, time in ((self.encoding, self.encode_s), ("prefill", self.prefill_s), ("decode", self.decode_s)):
            share = time.value / total_s if total_s else 0.0
            lines.append(f"  {label:<28}{_ms(time):<32}{share:.0%}")
        if self.media_s is not None:
            lines.append(f"  {'media decoding, on CPUs':<28}{1000 * self.media_s:,.3g} ms of a core, beside the engine")
        if self.actors_waited > 0.1:
            lines.append(f"  the engine waited for input in {self.actors_waited:.0%} of its time")
        lines.append(f"{'ceiling':<30}{_times(self.ceiling)}, if decoding took no time")
        for result in self.methods:
            parts = [_times(result.speedup) if result.speedup else "not measured"]
            parts += [f"{_ms(result.row_s)} per row"] if result.row_s else []
            parts += [f"acceptance length {result.acceptance_length:.2f}"] if result.acceptance_length > 1 else []
            parts += [] if result.lossless else ["lossy"]
            parts += [f"{_figures(result.device_hours)} device-hours"] if result.device_hours else []
            parts += [f"cost {_figures(result.cost)}"] if result.cost else []
            lines.append(f"  {result.method:<28}{', '.join(parts)}")
        lines.append(f"{'recommended':<30}{self.recommended}: {self.reason}")
        return lines


def judge(
    choice: TrialResult,
    methods: Mapping[str, bool],
    encoding: str,
    media_s: float | None = None,
    actors_waited: float = 0.0,
) -> PilotVerdict | None:
    """Judge a finished trial; `methods` maps names to whether they are lossless, plain decoding first. Return None if
    plain decoding was not measured."""
    if not choice.plain:
        return None
    shares = [sample.decode_s / (sample.encode_s + sample.prefill_s + sample.decode_s) for sample in choice.plain]
    share = mean_of(shares)
    share = Range(share.value, max(0.0, share.low), min(1.0, share.high))
    standings = {standing.method: standing for standing in choice.standings}
    results = tuple(_result(standings[name], lossless) for name, lossless in methods.items() if name in standings)
    if len(results) == 1:  # the trial's fit has no degrees of freedom for one method
        total_s = mean_of([sample.encode_s + sample.prefill_s + sample.decode_s for sample in choice.plain])
        results = (replace(results[0], row_s=total_s),)
    recommended, reason = _recommend(results, share)
    return PilotVerdict(
        encode_s=mean_of([sample.encode_s for sample in choice.plain]),
        prefill_s=mean_of([sample.prefill_s for sample in choice.plain]),
        decode_s=mean_of([sample.decode_s for sample in choice.plain]),
        decode_share=share,
        ceiling=Range(*(1 / (1 - value) if value < 1 else math.inf for value in (share.value, share.low, share.high))),
        methods=results,
        recommended=recommended,
        reason=reason,
        encoding=encoding,
        media_s=media_s,
        actors_waited=actors_waited,
    )


def _result(candidate: CandidateResult, lossless: bool) -> MethodResult:
    def ranged(value: float | None, low: float | None, high: float | None) -> Range | None:
        if value is None:
            return None
        return Range(value, 0.0 if low is None else low, math.inf if high is None else high)

    return MethodResult(
        candidate.method,
        lossless,
        ranged(candidate.sample_s, candidate.low_s, candidate.high_s),
        ranged(candidate.speedup, candidate.speedup_low, candidate.speedup_high),
        candidate.acceptance_length,
        candidate.note,
    )


def _recommend(results: tuple[MethodResult, ...], share: Range) -> tuple[str, str]:
    """Return the fastest method whose interval is above plain decoding, or `NONE`, with the reason."""
    plain, others = results[0], [result for result in results[1:] if result.speedup is not None]
    most = f"decoding takes {share.value:.0%} of the engine's time"
    if not others:
        return NONE, f"no method with a drafter was measured; {most}"
    best = max(others, key=lambda result: result.speedup.value if result.speedup else 0.0)
    assert best.speedup is not None
    reached = f"{best.method} reaches {_times(best.speedup)} of {plain.method}"
    if best.speedup.low > 1:
        return best.method, reached + ("" if best.lossless else ", but changes texts: compare them before you use it")
    if best.speedup.high < 1:
        return NONE, f"every method is slower than {plain.method}: {reached}; {most}"
    return NONE, f"no method is measurably faster than {plain.method}: {reached}; {most}"


def _ms(interval: Range) -> str:
    if not math.isfinite(interval.high):
        return f"{1000 * interval.value:,.3g} ms"
    return f"{1000 * interval.value:,.3g} ms ({1000 * max(0.0, interval.low):,.3g} to {1000 * interval.high:,.3g})"


def _times(interval: Range) -> str:
    text = f"{interval.value:.2f}x" if math.isfinite(interval.value) else "unbounded"
    return (
        f"{text} ({interval.low:.2f} to {interval.high:.2f})"
        if math.isfinite(interval.high) and interval.high > interval.low
        else text
    )


def _figures(interval: Range) -> str:
    if not math.isfinite(interval.high):
        return f"{interval.value:,.3g}"
    return f"{interval.value:,.3g} ({interval.low:,.3g} to {interval.high:,.3g})"


def finite(value: Any) -> Any:
    """Replace infinite numbers by None, which JSON has no form for."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def methods_of(config: CaptionJobConfig | SynthesizeJobConfig) -> dict[str, bool]:
    """Return the names of the pilot's methods, plain decoding first, and whether each is lossless."""
    return {method.label: method.verify_mode == "lossless" for method in pilot_method(config.method).methods}
