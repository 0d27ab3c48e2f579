"""Trains a draft head on the rows of a source, measures it on held-out rows, and writes it. `_job/checkpoint.pt` has
the weights, the optimizer, the step and the position in the source. A run is one process, or one of several
data-parallel workers that each process a part of every batch (`pipeline.training.workers`)."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from actors.loading.pair import set_template_options
from actors.training.learner import Learner, load_learner
from actors.training.samples import SAMPLE_ERROR_CODES, acceptance, accuracy, pace_of
from configs.load import ConfigError
from configs.training import TrainDrafterJobConfig
from decoding import Request, Sampling
from models.heads.files import keep_as_safetensors, make_readable
from models.heads.training.trainer import Reduce, Trainer
from models.loading.checkpoints import DTYPES
from models.target import Target
from pipeline.cluster.provenance import code_revision, versions
from pipeline.manifest.row_stream import Draw, RowStream, StreamPosition, read_ahead
from pipeline.rows.schemas import ERROR_CODES
from pipeline.storage import checkpoints
from pipeline.storage.output_dir import OutputDir
from pipeline.training.feed import TEACHER, Feed, FeedItem, open_cache
from pipeline.training.inputs import open_inputs
from pipeline.training.output import DONE, RUN
from pipeline.training.rows import is_held_out

CHECKPOINT, HEAD, LOG = "_job/checkpoint.pt", "_job/head", "_job/log.txt"
FORMAT = 1
PROGRESS_INTERVAL_S = 10.0
CODES = (*ERROR_CODES, *SAMPLE_ERROR_CODES)


class NoUsableRows(RuntimeError):
    """Raised if no row of the source can be learned from; the message counts the reasons."""


@dataclass(frozen=True)
class Worker:
    """One of `size` workers; `reduce` sums a tensor over all workers. Rank 0 measures and writes."""

    rank: int = 0
    size: int = 1
    reduce: Reduce = lambda _: None


class TrainingRun:
    """A training run in one worker: `train`, then `finish` on rank 0, which also writes the log and checkpoints."""

    def __init__(self, job: TrainDrafterJobConfig, output: OutputDir, worker: Worker) -> None:
        if job.workers.torch_threads is not None:
            torch.set_num_threads(job.workers.torch_threads)
        self.job = job
        self.worker = worker
        self._output = output
        inputs = open_inputs(job).resumed(output)
        begun = json.loads(Path(output.path(RUN)).read_text(encoding="utf-8"))
        self._source = inputs.describe()
        if self._source != begun["source"]:
            raise ConfigError("source: it is not what it was when the run began")
        self._spans = inputs.spans()
        self.learner: Learner = load_learner(checkpoints.fetched(job))
        if isinstance(self.learner.target, Target):
            set_template_options(inputs.template_options, self.learner.target.front_end, job.target.path)
        cache = open_cache(job, output, worker.size)
        revision: str = begun["target_revision"]
        self._feed = Feed(job, inputs, self.learner, revision, cache, worker.rank, worker.size)
        workers, is_bf16 = job.workers, self.learner.target.dtype == torch.bfloat16
        self.trainer = Trainer(
            self.learner.target,
            self.learner.task,
            pace_of(job.training),
            workers.max_forward_rows,
            worker.reduce,
            workers.max_forward_tokens,
            DTYPES.get(job.training.gemm_dtype, torch.bfloat16 if is_bf16 else torch.float32),
        )
        self._position = StreamPosition()
        self._first_epoch = {"num_taught_rows": 0}
        self._best: dict[str, Any] | None = None
        self._history: list[dict[str, float]] = []
        self._seconds = 0.0
        self._load()

    def _log(self, line: str) -> None:
        """Add a line to the log, and print it if this is the only worker."""
        with open(self._output.path(LOG), "a", encoding="utf-8") as log:
            log.write(line + "\n")
        if self.worker.size == 1:
            print(line, file=sys.stderr, flush=True)

    @property
    def is_first(self) -> bool:
        return self.worker.rank == 0

    def train(self) -> None:
        """Train from the last checkpoint; raise ConfigError if no row is held out, and NoUsableRows if no row of an
        epoch, or of all steps, is usable."""
        training = self.job.training
        self._read_held_out()

        stream = RowStream(
            self._spans, lambda sample_id: not is_held_out(self.job, sample_id), training.seed, training.shuffle_rows
        )
        began = reported = saved = time.monotonic()
        seconds_before, rows_since, tokens_since, losses = self._seconds, 0, 0, list[float]()
        draws = read_ahead(self._read(stream), self.job.workers.read_ahead_batches)
        while self.trainer.step < training.num_steps:
            draw, read = next(draws)
            items = self._feed.items(draw, read)
            if draw.epoch > self._position.epoch and (line := self._feed.describe_cache()) and self.is_first:
                self._log(line)
            loss, num_tokens = self._step(draw, items)
            self._position = draw.position
            step, now = self.trainer.step, time.monotonic()
            self._seconds = seconds_before + now - began
            if not self.is_first:
                continue
            rows_since, tokens_since = rows_since + draw.table.num_rows, tokens_since + num_tokens * self.worker.size
            losses += [] if loss is None else [loss]
            is_last = step == training.num_steps
            if is_last or now - reported >= PROGRESS_INTERVAL_S:
                rate, tokens_rate = (count / max(1e-9, now - reported) for count in (rows_since, tokens_since))
                left_s = (training.num_steps - step) * training.batch_rows / max(1e-9, rate)
                self._log(
                    f"step {step}/{training.num_steps} loss {sum(losses) / max(1, len(losses)):.4f} {rate:.1f} rows/s, "
                    f"{tokens_rate:.0f} tokens/s, epoch {draw.epoch + 1}, {left_s:.0f} s left"
                )
                reported, rows_since, tokens_since, losses = now, 0, 0, []
            is_measured = is_last or step % training.measure_every_steps == 0
            if is_measured:
                self._measure()
            if is_measured or now - saved >= self.job.workers.checkpoint_every_s:
                self._save()
                saved = time.monotonic()
        draws.close()  # type: ignore[attr-defined]
        self._check_taught()

    def _read(self, stream: RowStream) -> Iterator[tuple[Draw, Callable[[], list[FeedItem]]]]:
        """Yield each batch, and a function that returns this worker's share of it, decoded or read from the cache."""
        for draw in stream.draws(self.job.training.batch_rows, self._position):
            yield draw, self._feed.read_ahead(draw)

    def _step(self, draw: Draw, items: list[FeedItem]) -> tuple[float | None, int]:
        """Learn from a batch; return its loss, and the number of tokens of this worker's samples."""
        samples, codes = self._feed.samples(items)
        if draw.epoch == 0:
            keys = {item.ordinal: item.key for item in items}
            loss = self.trainer.learn(samples, lambda ordinal, states: self._feed.kept(keys[ordinal], states))
        else:
            loss = self.trainer.learn(samples)
        left_out = torch.zeros(len(CODES) + 1, dtype=torch.float64)  # by code, then the number of samples
        for code in codes:
            left_out[CODES.index(code)] += 1
        if draw.epoch == 0:
            left_out[-1] = len(samples)
            left_out = left_out.to(self.learner.target.device)
            self.worker.reduce(left_out)
            for name, count in zip((*CODES, "num_taught_rows"), left_out.tolist(), strict=True):
                if count:
                    self._first_epoch[name] = self._first_epoch.get(name, 0) + int(count)
        else:
            self._check_taught()
        return loss, sum(sample.length for _, sample in samples)

    def _check_taught(self) -> None:
        if self._first_epoch["num_taught_rows"] == 0:
            raise NoUsableRows(f"no row of source can be learned from; left out: {json.dumps(self._left_out())}")

    def _left_out(self) -> dict[str, int]:
        return {name: count for name, count in self._first_epoch.items() if name in CODES}

    def _read_held_out(self) -> None:
        """Read held-out rows on rank 0; raise ConfigError on all if there are none."""
        reasons = self._feed.read_held_out(self._spans) if self.is_first else {}
        count = torch.tensor([float(len(self._feed.held_out))], device=self.learner.target.device)
        self.worker.reduce(count)
        if int(count) == 0:
            left_out = f" ({json.dumps(reasons)} left out)" if reasons else ""
            raise ConfigError(
                f"source: no row of it can be held out at a share of {self.job.training.held_out_share:g}{left_out}; "
                "raise training.held_out_share, or bring more rows"
            )

    def _measure(self) -> None:
        """Measure accuracy on held-out rows, and keep the best weights: by top-1 accuracy, which decides the length of
        chains, or for images, whose tokens have many likely continuations, by top-3 accuracy (LANTERN, appendix C)."""
        best_by = "top1_accuracy" if self.job.image is None else "top3_accuracy"
        accuracies = accuracy(self.learner.task, self.learner.target, self._feed.held_out_samples())
        self._history.append({"step": self.trainer.step, **accuracies})
        top1, top3 = accuracies["top1_accuracy"], accuracies["top3_accuracy"]
        self._log(f"step {self.trainer.step} held out: top-1 {top1:.4f} top-3 {top3:.4f}")
        if self._best is None or accuracies[best_by] > self._best[best_by]:
            self._best = {"step": self.trainer.step, **accuracies, "weights": self.trainer.weights()}

    def _save(self) -> None:
        """Write the checkpoint atomically."""
        state = {
            "format": FORMAT,
            "trainer": self.trainer.state(),
            "place": asdict(self._position),
            "first_epoch": self._first_epoch,
            "best": self._best,
            "history": self._history,
            "seconds": self._seconds,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        self._output.write_bytes(CHECKPOINT, buffer.getbuffer())

    def _load(self) -> None:
        """Load the checkpoint if there is one; raise ConfigError if it cannot be read."""
        path = Path(self._output.path(CHECKPOINT))
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            assert state["format"] == FORMAT, f"format {state['format']}"
            self.trainer.resume(state["trainer"])
        except Exception as error:  # a torn file raises any error
            reason = (str(error) or type(error).__name__).splitlines()[0]
            message = f"output.path: {path} cannot be read ({reason}); remove the folder to begin anew"
            raise ConfigError(message) from None
        self._position = StreamPosition(**state["place"])
        self._first_epoch, self._best = state["first_epoch"], state["best"]
        self._history, self._seconds = state["history"], state["seconds"]
        if self.is_first:
            self._log(f"resuming after step {self.trainer.step}")

    def finish(self) -> dict[str, Any]:
        """Measure the final or best head, write it with `training.json`, and return the measurements; rank 0 only."""
        assert self.is_first, self.worker
        job, learner = self.job, self.learner
        at_step = self.trainer.step
        if job.training.keep == "best":
            assert self._best is not None
            self.trainer.set_weights(self._best["weights"])
            at_step = self._best["step"]
        dtype = DTYPES.get(job.output.dtype, learner.target.dtype)
        # Round before measuring, so that the measured weights equal the written ones.
        learner.round(dtype)
        measured: dict[str, Any] = accuracy(learner.task, learner.target, self._feed.held_out_samples())
        measured["at_step"] = at_step
        if requests := self._requests():
            room = self._feed.longest + requests[0].sampling.max_new_tokens
            slots = min(16, job.workers.max_forward_rows)
            measured |= acceptance(learner.task, learner.target, requests, slots, room)
        measured |= {
            "num_taught_rows": self._first_epoch["num_taught_rows"],
            "num_held_out_rows": len(self._feed.held_out),
            "left_out": self._left_out(),
            "num_epochs": self._position.epoch + 1,
            "seconds": round(self._seconds, 1),
        }
        self._write(measured, dtype)
        return measured

    def _requests(self) -> list[Request]:
        options, limit = self.job.acceptance, self.learner.target.max_new_tokens
        overrides = {
            "max_new_tokens": limit or options.max_new_tokens,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "guidance_scale": options.guidance_scale,
        }
        sampling = Sampling(**(self.learner.processors | overrides))
        rows = self._feed.held_out[: options.num_rows]
        return [
            replace(self.learner.training_samples.request(row, sampling), seed=self.job.training.seed) for row in rows
        ]

    def _write(self, measured: dict[str, Any], dtype: torch.dtype) -> None:
        """Write the head's files and `training.json`, then remove the checkpoint."""
        head, folder = Path(self._output.path(HEAD)), Path(self._output.path(""))
        shutil.rmtree(head, ignore_errors=True)
        self.learner.save(head, dtype)
        keep_as_safetensors(head)
        make_readable(head)
        for file in sorted(head.iterdir()):
            os.replace(file, folder / file.name)
        head.rmdir()
        job = self.job.model_dump(mode="json")
        del job["output"]["path"]  # the path of the folder of this file, which may be copied elsewhere
        record = {"job": job, "source": self._source, "measured": measured, "history": self._history}
        self._output.write_json(DONE, record | {"versions": {**versions(), "code_revision": code_revision()}})
        Path(self._output.path(CHECKPOINT)).unlink(missing_ok=True)
        shutil.rmtree(self._output.path(TEACHER), ignore_errors=True)
