"""Makes the samples of a run's batches and of its held-out rows, and keeps the target's states of them on disk.

In the first epoch, a batch is read from the cache if it has all of its rows; otherwise the target runs over the whole
batch. Later epochs read the rows that are stored, without decoding their media, and run the target over the others.
Nothing is stored after the first epoch. Which rows run together is therefore the same after a resume, and so are all
bits of their states.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import pyarrow as pa

from actors.training.learner import Learner
from actors.training.samples import TrainingRow, TrainingSampleError
from configs.load import ConfigError
from configs.training import TrainDrafterJobConfig
from models.heads.training.teacher import RowStates, Sample, TrainingSample, teach_rows
from models.heads.training.teacher_cache import TeacherCache, key_of_sample
from models.loading.checkpoints import DTYPES
from models.target import Target
from pipeline.manifest.row_stream import Draw, SpanSource
from pipeline.storage.output_dir import OutputDir
from pipeline.training.inputs import Inputs
from pipeline.training.output import sole
from pipeline.training.rows import is_held_out, read_rows

TEACHER = "_job/teacher"


@dataclass(frozen=True)
class FeedItem:
    """A row of a batch: its `ordinal` and cache `key`, and its states, the decoded row, or an error code."""

    ordinal: int
    key: str
    content: RowStates | TrainingRow | str


class Feed:
    """Samples of the rows that one worker learns from, of `size` workers that share each batch."""

    def __init__(
        self,
        job: TrainDrafterJobConfig,
        inputs: Inputs,
        learner: Learner,
        target_revision: str,
        cache: TeacherCache | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._job, self._learner, self._cache = job, learner, cache
        self._rank, self._size = rank, size
        self._options = inputs.decode_options(learner.special_tokens)
        self._identity = _identity(job, inputs, learner, target_revision)
        dtype = job.workers.teacher_cache.dtype
        self._dtype = DTYPES.get(dtype, learner.target.dtype)
        self._held_out: list[tuple[str, TrainingRow]] = []
        self._is_stored = False
        self._decoding = Lock()  # images are decoded by one child process
        self.longest = 0

    # --- batches

    def read_ahead(self, draw: Draw) -> Callable[[], list[FeedItem]]:
        """Read a batch in the read-ahead thread; return a function that returns it in the thread that trains.

        Batches of the second epoch are read in the latter while batches of the first may still have to be stored.
        """
        if draw.epoch > 0 and not self._is_stored:
            return partial(self._items, draw)
        items = self._items(draw)
        return lambda: items

    def items(self, draw: Draw, read: Callable[[], list[FeedItem]]) -> list[FeedItem]:
        """Return a batch that `read_ahead` has read. All earlier batches are learned."""
        self._is_stored = self._is_stored or draw.epoch > 0
        return read()

    def _items(self, draw: Draw) -> list[FeedItem]:
        """Return this worker's part of a batch; rows that are not stored are decoded."""
        numbers = list(range(self._rank, draw.table.num_rows, self._size))
        part = draw.table.take(pa.array(numbers, pa.int64()))
        ordinals = [draw.first + number for number in numbers]
        keys = self._keys(part, ordinals)
        stored = self._stored(keys, all_or_none=draw.epoch == 0)
        missing = [index for index, states in enumerate(stored) if states is None]
        with self._decoding:
            decoded = read_rows(part.take(missing), self._job, self._options, self._learner.shape) if missing else []
        rows = iter(decoded)
        contents = [next(rows) if states is None else states for states in stored]
        return [FeedItem(*each) for each in zip(ordinals, keys, contents, strict=True)]

    def samples(self, items: Sequence[FeedItem]) -> tuple[list[tuple[int, Sample]], list[str]]:
        """Return the samples by ordinal, and the error codes of rows without one."""
        samples: list[tuple[int, Sample]] = []
        codes: list[str] = []
        for item in items:
            sample = self._sample(item.content, item.ordinal)
            if isinstance(sample, str):
                codes.append(sample)
            else:
                samples.append((item.ordinal, sample))
        return samples, codes

    def kept(self, key: str, states: RowStates) -> RowStates:
        """Store new states of a sample, and return them as they are stored."""
        if self._cache is None:
            return states
        states = states.map(lambda value: value.to(self._dtype) if value.is_floating_point() else value)
        self._cache.put(key, states)
        return states

    def _stored(self, keys: Sequence[str], all_or_none: bool) -> list[RowStates | None]:
        """Return the stored states of rows; with `all_or_none`, those of all rows or of none."""
        nothing: list[RowStates | None] = [None] * len(keys)
        if self._cache is None or (all_or_none and not all(self._cache.has(key) for key in keys)):
            return nothing
        stored = [self._cache.get(key) for key in keys]
        return nothing if all_or_none and None in stored else stored

    def _keys(self, rows: pa.Table, ordinals: Sequence[int | None]) -> list[str]:
        """Return the cache keys of rows: hashes of their cells as read, and of whether their condition is dropped."""
        if self._cache is None:
            return [""] * rows.num_rows
        is_null = self._learner.training_samples.is_null
        cells = (repr(row) for row in rows.to_pylist())
        variants = ("null" if is_null(ordinal) else "given" for ordinal in ordinals)
        return [key_of_sample(self._identity, *each) for each in zip(cells, variants, strict=True)]

    def _sample(self, content: RowStates | TrainingRow | str, ordinal: int | None) -> Sample | str:
        """Return the sample of a row, or an error code."""
        if isinstance(content, str | RowStates):
            return content
        try:
            return self._learner.training_samples.training_sample(content, ordinal)
        except TrainingSampleError as error:
            return error.code

    # --- held-out rows

    @property
    def held_out(self) -> list[TrainingRow]:
        return [row for _, row in self._held_out]

    def read_held_out(self, spans: SpanSource) -> Counter[str]:
        """Read the first usable held-out rows, and return the number of others by error code. Rows are kept in memory,
        not samples, whose embeddings are a hundred times the size of an image."""
        codes = Counter[str]()
        for key, content in self._held_out_rows(spans):
            sample = self._sample(content, None)
            if isinstance(content, str) or isinstance(sample, str):
                codes[str(sample)] += 1
                continue
            self.longest = max(self.longest, sample.length)
            self._held_out.append((key, content))
            if len(self._held_out) == self._job.training.held_out_rows:
                break
        return codes

    def _held_out_rows(self, spans: SpanSource) -> Iterator[tuple[str, TrainingRow | str]]:
        for span in range(spans.num_spans):
            table = spans.read(span)
            for index, sample_id in enumerate(table.column("sample_id").to_pylist()):
                if is_held_out(self._job, sample_id):
                    row = table.slice(index, 1)
                    contents = read_rows(row, self._job, self._options, self._learner.shape)
                    yield from zip(self._keys(row, [None]), contents, strict=True)

    def held_out_samples(self) -> Iterator[list[RowStates]]:
        """Yield the held-out rows after the target's forward, in batches of `workers.max_forward_rows`."""
        size, make = self._job.workers.max_forward_rows, self._learner.training_samples.training_sample
        target, task = self._learner.target, self._learner.task
        for start in range(0, len(self._held_out), size):
            keys, rows = zip(*self._held_out[start : start + size], strict=True)
            stored = [states for states in self._stored(keys, all_or_none=True) if states is not None]
            if not stored:
                fresh: list[TrainingSample] = [make(row, None) for row in rows]
                stored = list(map(self.kept, keys, teach_rows(target, fresh, task.feature_layers)))
            yield stored

    def describe_cache(self) -> str | None:
        """Return the size of the cache for the log; None without a cache."""
        if (cache := self._cache) is None:
            return None
        damaged = f", {cache.num_damaged} damaged files were removed" if cache.num_damaged else ""
        return (
            f"teacher states: {cache.num_bytes / 1e6:.1f} MB of at most {cache.max_bytes / 1e6:.1f} MB in "
            f"{cache.folder}, {cache.num_refused} rows do not fit{damaged}"
        )


def _identity(job: TrainDrafterJobConfig, inputs: Inputs, learner: Learner, revision: str) -> str:
    """Return all that determines the states of a row besides its cells, as JSON."""
    config = job.resolved()
    image = config["image"] and {name: value for name, value in config["image"].items() if name != "null_share"}
    options = inputs.prompt_options
    parts = {name: config[name] for name in ("source", "prompt", "answer_column", "answer_prefix", "target")}
    parts |= {"read": inputs.source.model_dump(mode="json"), "image": image, "revision": revision}
    asked_prompt = options.prompt and options.prompt.content()
    parts |= {"asked": [asked_prompt, options.columns and options.columns.model_dump(mode="json")]}
    if inputs.template_options:
        parts |= {"template_options": inputs.template_options}
    parts |= {"max_tokens": job.training.max_tokens, "layers": learner.task.feature_layers}
    if isinstance(learner.target, Target) and learner.target.front_end.special_tokens_changed:
        parts |= {"special_tokens": "as apply_chat_template"}
    parts |= {"dtypes": [str(learner.target.dtype), job.workers.teacher_cache.dtype]}
    return json.dumps(parts, sort_keys=True)


def cache_folder(job: TrainDrafterJobConfig, output: OutputDir) -> Path:
    """Return the folder of the cache: the configured one, or one in the output that the run removes at its end."""
    path = job.workers.teacher_cache.path
    return Path(output.path(TEACHER)) if path is None else Path(path).expanduser().resolve()


def open_cache(job: TrainDrafterJobConfig, output: OutputDir, size: int) -> TeacherCache | None:
    """Open the cache for one of `size` workers; None if it is off. Raises ConfigError if the folder cannot be used."""
    if job.workers.teacher_cache.max_bytes == 0:
        return None
    folder = cache_folder(job, output)
    try:
        return TeacherCache(folder, job.workers.teacher_cache.max_bytes, size)
    except OSError as error:
        raise ConfigError(f"workers.teacher_cache.path: {folder} cannot be used: {error.strerror}") from None


@contextmanager
def sole_cache(job: TrainDrafterJobConfig, output: OutputDir) -> Iterator[None]:
    """Lock the cache while the block runs, and remove partial files; raise ConfigError if another run uses it."""
    if (cache := open_cache(job, output, 1)) is None:
        yield
        return
    with sole(cache.folder / "lock", f"workers.teacher_cache.path: another run uses {cache.folder}; choose another"):
        cache.discard_partial()
        yield
