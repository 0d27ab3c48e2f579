"""Verifies an output: decodes a share of its rows again, compares them, and writes the rows that are not equal.

_job/verify/NAME/part-NNNN.parquet    one file per round (`pipeline.verify.compare.DIFFERENCES`)
_job/verify/NAME/verification.json    the findings
"""

from __future__ import annotations

import functools
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray

from actors.losses import Loss, loss_of
from actors.margins import Margins
from configs.load import ConfigError
from configs.synthesis import SynthesizeJobConfig
from files.plurals import counted
from pipeline.cluster import ray_session
from pipeline.manifest.datasource import SpanDatasource
from pipeline.output import checksums
from pipeline.output.files import list_published
from pipeline.output.output_ids import ids_of_several_rows
from pipeline.output.recorded_job import RecordedJob, read_any_job, rows_without
from pipeline.reports.loss import Losses, loss_interval
from pipeline.resources.resolve import resolve
from pipeline.run.execution import stream
from pipeline.run.external_parts import install_recorded
from pipeline.run.graph import Build
from pipeline.run.job_plan import JobPlan
from pipeline.run.plan import Plan
from pipeline.storage import access
from pipeline.storage.first_touch import check_stores
from pipeline.storage.output_dir import DATA, OutputDir, as_json
from pipeline.storage.retries import planning
from pipeline.synthesis.plan import SynthesisPlan
from pipeline.verify.bounds import (
    CONFIDENCE,
    detection_probability,
    share_interval,
    upper_share,
)
from pipeline.verify.compare import DIFFERENT, EQUAL, NOT_COMPARED, TIE, RowComparison
from pipeline.verify.rows import OUTPUT, SampleShare, count_chosen, rounds
from pipeline.verify.second import Settings, check_second_models, inexact_reason, second_config

FOLDER = "_job/verify"
MAX_NAMED = 5
NUM_FAULTY = (1, 10, 100, 1000)
"""Numbers of faulty rows for which the probability of detection is shown."""


@dataclass(frozen=True)
class Prepared:
    """A checked verification: the recorded job, the plan of the second decoding, the loss, and numbers of results."""

    settings: Settings
    job: RecordedJob[Any]
    plan: JobPlan
    loss: Loss
    num_rows: int
    num_chosen: int
    inexact: str
    """Why tokens of the output may differ from the second decoding without a fault; empty if they may not."""
    repeated: tuple[str, ...] = ()
    """Ids that several rows of the output have."""
    damaged: tuple[str, ...] = ()
    """Files whose bytes are not those that were written, with the reasons."""

    @property
    def choice(self) -> SampleShare:
        return SampleShare(self.settings.share, self.settings.seed)


@dataclass
class Verification:
    """Findings: `counts` by outcome, samples compared and with a differing row, and the losses."""

    prepared: Prepared
    folder: str
    counts: Counter[str] = field(default_factory=Counter)
    num_samples: int = 0
    num_different: int = 0
    losses: Losses = field(default_factory=Losses)

    @property
    def loss_interval(self) -> tuple[float, float]:
        """Interval of the mean loss; Clopper–Pearson for the metric `exact`."""
        if self.prepared.settings.metric != "exact":
            return loss_interval(self.losses.num_rows, self.losses.total, CONFIDENCE)
        return share_interval(round(self.losses.total), self.losses.num_rows)

    def lines(self) -> list[str]:
        """Return the findings as lines of text."""
        prepared, counts = self.prepared, self.counts
        share = prepared.settings.share
        probabilities = ", ".join(f"{detection_probability(share, k):.1%} of {k:,}" for k in NUM_FAULTY)
        lines = [
            f"output       {prepared.job.output.shown()}: {prepared.num_rows:,} rows, {prepared.num_chosen:,} chosen "
            f"(share {share:g}, seed {prepared.settings.seed})",
            f"detection    at least one is chosen with probability {probabilities} faulty samples",
            f"rows         {counts[EQUAL]:,} equal, {counts[TIE]:,} different within the tie tolerance, "
            f"{counts[DIFFERENT]:,} different, {counts[NOT_COMPARED]:,} not compared",
        ]
        if prepared.repeated:
            lines.append(f"repeated     {len(prepared.repeated):,} ids have several rows: {_first(prepared.repeated)}")
        if prepared.damaged:
            files = counted(len(prepared.damaged), "file")
            lines.append(f"damaged      {files} (jobs.check): {_first(prepared.damaged)}")
        if counts["by_text"]:
            lines.append(f"by text      {counts['by_text']:,} rows have no stored tokens (sink.keep_tokens)")
        if prepared.inexact:
            low, high = self.loss_interval
            mean = "unknown" if self.losses.mean is None else f"{1 - self.losses.mean:.2%}"
            retention = f"{mean} [{1 - high:.2%}, {1 - low:.2%}]"
            lines += [
                f"retention    {retention} by {prepared.settings.metric}, {CONFIDENCE:.0%} confidence",
                f"             {prepared.inexact}",
            ]
        else:
            lines.append(f"bound        {self.statement()}")
        return [*lines, f"differences  {self.folder}"]

    def statement(self) -> str:
        """Return what the sample implies about all samples."""
        count = "none" if not self.num_different else f"{self.num_different:,}"
        share = upper_share(self.num_different, self.num_samples) if self.num_samples else 1.0
        unit = "samples" if self.prepared.job.multiplies_rows else "rows"
        return (
            f"with {self.num_samples:,} {unit} verified and {count} different, at most {100 * share:.3g} % of "
            f"{unit} differ at {CONFIDENCE:.0%} confidence"
        )

    def to_json(self) -> dict[str, Any]:
        settings, job = self.prepared.settings, self.prepared.job
        low, high = self.loss_interval
        return {
            "config_fingerprint": job.fingerprint,
            "against": None if settings.against is None else str(settings.against),
            "method": self.prepared.plan.config.method.label,
            "share": settings.share,
            "seed": settings.seed,
            "num_rows": self.prepared.num_rows,
            "num_chosen": self.prepared.num_chosen,
            **{f"num_{name}": self.counts[name] for name in (EQUAL, TIE, DIFFERENT, NOT_COMPARED, "by_text")},
            "num_repeated_ids": len(self.prepared.repeated),
            "num_damaged_files": len(self.prepared.damaged),
            "num_samples": self.num_samples,
            "max_different_share": upper_share(self.num_different, self.num_samples) if self.num_samples else 1.0,
            "detection_probability": {str(k): detection_probability(settings.share, k) for k in NUM_FAULTY},
            "loss": {"metric": settings.metric, "mean": self.losses.mean, "low": low, "high": high},
            "confidence": CONFIDENCE,
            "inexact": self.prepared.inexact,
        }


@planning()
def prepare(settings: Settings) -> Prepared:
    """Check a verification before Ray starts.

    Raises:
        ConfigError: there is no output of a job, an output of images has no codes, its target has changed, the second
            configuration is invalid, the metric cannot be imported, or no row is chosen.
    """
    loss = loss_of(settings.metric, "--metric")
    job = read_any_job(settings.output, OUTPUT)
    config = second_config(job, settings)
    install_recorded(config, job.source_code, job.check_code)
    check_stores("source.path", config.source.paths)
    with access.refusals(OUTPUT, job.output.url):
        num_rows, num_chosen = count_chosen(job, SampleShare(settings.share, settings.seed))
    if not num_chosen:
        raise ConfigError(
            f"--share {settings.share:g}: none of the {num_rows:,} published rows is chosen; raise the share, or wait "
            "until the job has published rows"
        )
    resources = resolve(config, config.job)
    config, pair = check_second_models(resources.apply(config))
    revision = pair.revisions.get("target")
    if settings.against is None and revision != job.target_revision:
        raise ConfigError(
            f"model.target: {config.model.target.path} is revision {revision}, and the output was decoded by revision "
            f"{job.target_revision}; restore it, or compare with another target by --against"
        )
    if settings.against is None and pair.revisions.get("target_adapter", "") != job.target_adapter:
        raise ConfigError(
            f"model.target.adapter: {config.model.target.adapter} has changed since the output was decoded; restore it"
        )
    if settings.against is None and pair.revisions.get("special_tokens") != job.special_tokens:
        raise ConfigError(
            f"model.target: {config.model.target.path} reads other tokens than when the output was decoded, because "
            "chats have only the special tokens of the chat template now; verify it with the version that made it"
        )
    kind: Any = SynthesisPlan if job.makes_images else Plan
    plan: JobPlan = kind(config, pair, job.manifest, job.output, resources=resources)
    second = inexact_reason(config)
    inexact = inexact_reason(job.config) or (second and f"the second decoding: {second}")
    repeated = ids_of_several_rows(job.output, list_published(job.output, DATA))
    return Prepared(settings, job, plan, loss, num_rows, num_chosen, inexact, tuple(repeated), _damaged(job))


def _damaged(job: RecordedJob[Any]) -> tuple[str, ...]:
    """Return the published results whose bytes are not those that were written, with the reasons."""
    return tuple(
        f"{DATA}/{view.prefix}{name.removeprefix(f'{DATA}/')}: {reason}"
        for view in job.views
        for verified in [checksums.verify(view, is_tolerant=True)]
        for name, reason in (verified.problems | verified.unrecorded).items()
        if name.startswith(f"{DATA}/")
    )


def _first(names: Sequence[str]) -> str:
    """Return the first of several names, and dots if there are more."""
    listed = [access.printable(name) for name in names[:MAX_NAMED]]
    return ", ".join([*listed, *(["…"] if len(names) > MAX_NAMED else [])])


def verify(prepared: Prepared, build: Any) -> Verification:
    """Decode the chosen rows under Ray by `build` (of captions: `BuildCaptions`), compare them and write the findings.

    Raises:
        ConfigError: a file of the source is gone or has changed.
        MetricError: the metric fails on a row.
        ErrorBudgetSpent: more rows failed than `job.max_error_share` allows.
    """
    settings, job = prepared.settings, prepared.job
    name = f"share-{settings.share:g}-seed-{settings.seed}-{prepared.plan.identity.fingerprint}"
    verification = Verification(prepared, job.output.shown(f"{FOLDER}/{name}"))
    for old in job.output.list_files(f"{FOLDER}/{name}"):
        job.output.remove(f"{FOLDER}/{name}/{old}")
    with ray_session.session(prepared.plan.config.job):
        for number, recorded in enumerate(rounds(job, prepared.choice, prepared.num_chosen)):
            compared = _round(prepared, recorded, build)
            _write(job.output, f"{FOLDER}/{name}/part-{number:04d}.parquet", compared.table())
            samples, different = compared.num_samples()
            verification.counts += compared.counts
            verification.losses = verification.losses.plus(compared.losses)
            verification.num_samples += samples
            verification.num_different += different
    job.output.write_recorded(f"{FOLDER}/{name}/verification.json", as_json(verification.to_json()))
    return verification


def _round(prepared: Prepared, recorded: pa.Table, build: Any) -> RowComparison:
    compared = RowComparison(recorded, prepared.loss)
    if not recorded.num_rows:
        return compared
    for results in decode_again(prepared, recorded, build):
        compared.add(results)
    compared.finish()
    asked = compared.asked()
    if asked.num_rows and not prepared.inexact and not prepared.job.makes_images:
        ids = pa.array(asked["sample_id"].to_pylist(), pa.string())
        rows = recorded.filter(pa.compute.is_in(recorded["sample_id"], value_set=ids))
        load = functools.partial(ray.get, ray.put(asked))
        margins = list(decode_again(prepared, rows, functools.partial(build, actor=Margins, asked=load)))
        compared.add_margins(pa.concat_tables(margins), prepared.settings.tolerance)
    return compared


def decode_again(prepared: Prepared, rows: pa.Table, build: Build) -> Iterator[pa.Table]:
    """Run `build` over the samples of these results."""
    plan = prepared.plan
    manifest = prepared.job.reopened(prepared.job.files_of(rows))
    if isinstance(plan.config, SynthesizeJobConfig) and (features := plan.config.columns.features) is not None:
        manifest = replace(manifest, keep=pa.schema([prepared.job.manifest.keep.field(features)]))
    plan = type(plan)(plan.config, plan.pair, manifest, plan.output)
    done = rows_without(rows, manifest)
    datasource = SpanDatasource(
        *(plan.config.source, manifest, plan.fields),
        with_images=plan.reads_images,
        done=done,
        has_conversations=plan.has_conversations,
    )
    return stream(plan, build, datasource, rows.num_rows)


def _write(output: OutputDir, relative: str, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    output.write_recorded(relative, sink.getvalue())
