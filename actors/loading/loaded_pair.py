"""Builds engines over a loaded target and its drafter, and compiles or captures the models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from actors.loading.method import DrafterModel, build_method, plain_method
from actors.loading.slot_count import count_slots
from configs.load import ConfigError
from configs.method import MethodConfig
from configs.pool import EnginePoolConfig
from configs.schema import CaptionJobConfig
from configs.synthesis import SynthesizeJobConfig
from decoding import Engine
from decoding.contracts import Method
from decoding.drafters.guarded import guarded
from decoding.drafters.suffix_index import Corpus
from models.backends.pages import num_pages_of
from models.contract import TargetModel
from models.llamagen.neighbours import CodebookError

MIN_COMPILED_BYTES = 1 << 28
"""Minimum size of the largest decoder at which `auto` compiles; smaller models gain less than compilation costs."""


@dataclass(frozen=True)
class PairInfo:
    """Metadata of a pair; `revisions` maps each checkpoint's role to the revision of its content."""

    target_id: str
    drafter_id: str
    revisions: dict[str, str]


@dataclass
class PageShare:
    """Pages of the target's KV cache for each slot of an engine; None for a KV cache without pages."""

    per_slot: float | None = None

    def of(self, slots: int, num_rows: int, num_positions: int) -> int | None:
        """Return the pages of an engine with `slots`, enough for one sample with `num_rows` rows of `num_positions`."""
        if self.per_slot is None:
            return None
        return max(int(slots * self.per_slot), num_rows * num_pages_of(num_positions))


@dataclass(frozen=True)
class LoadedPair(ABC):
    """A loaded target and its drafter, which is a model, a head on the target, or None.

    `codebook` (V, code_dim) is the codebook of an image target, for acceptance rules that compare codes. `corpora` are
    the finished outputs that the drafter `suffix` searches, by size; they outlive an engine.
    """

    config: CaptionJobConfig | SynthesizeJobConfig
    target: TargetModel
    drafter: DrafterModel | None
    info: PairInfo
    codebook: Tensor | None = None
    corpora: dict[int, Corpus] = field(default_factory=dict, init=False, compare=False)
    _pages: PageShare = field(default_factory=PageShare, init=False, compare=False)

    @property
    def target_id(self) -> str:
        return self.info.target_id

    @property
    def drafter_id(self) -> str:
        return self.info.drafter_id

    @property
    @abstractmethod
    def max_context_tokens(self) -> int:
        """Maximum number of KV positions of one sample."""

    def engine(self, slots: int, choice: MethodConfig | None = None) -> Engine:
        """Build an engine with the configured method, or with `choice`, a candidate of `method.auto`.

        Raises ConfigError if the codebook does not fit the target or the rule.
        """
        try:
            method = build_method(choice or self.config.method, self.drafter, self.target, self.codebook, self.corpora)
        except CodebookError as error:
            raise ConfigError(f"model.vq: {error}") from None
        return self._engine(guarded(method), slots)

    def available(self, method: MethodConfig) -> MethodConfig:
        """Return a method without the candidates of `auto` that need an MTP layer, if the target has none."""
        if method.auto is None or self.target.mtp is not None:
            return method
        kept = tuple(each for each in method.auto.candidates if each.drafter.kind != "mtp")
        return method.model_copy(update={"auto": method.auto.model_copy(update={"candidates": kept})})

    def plain_engine(self, slots: int = 1) -> Engine:
        """Build an engine without a drafter."""
        return self._engine(plain_method(), slots)

    def count_slots(self) -> tuple[int, str]:
        """Return the number of slots that fit into memory with each of the job's methods, and the limiting reason.
        Engines that are built later share as many pages of a KV cache as fit beside these slots."""
        config = self.config
        methods = self.available(config.method).methods
        count = count_slots(config.pool, methods, self.target, self.drafter, self.max_context_tokens)
        self._pages.per_slot = count.pages_per_slot
        return count.slots, count.reason

    def _engine(self, method: Method, slots: int) -> Engine:
        pool, most = self.config.pool, self.max_context_tokens
        num_scratch = method.tree.num_scratch(method.drafter.shares_cache)
        num_pages = self._pages.of(slots, self.target.num_lanes, most + num_scratch)
        return Engine(self.target, method, slots, most, pool.max_row_s, pool.max_prefill_tokens, num_pages=num_pages)


def compile_models(pool: EnginePoolConfig, models: Sequence[TargetModel]) -> None:
    """Compile or capture the models of a pair, as configured; raise ConfigError if a model does not support it.

    `auto` depends only on weights and hardware, so that all engines of a job on one type of machine decide alike.
    """
    sizes = (sum(weight.numel() * weight.element_size() for weight in model.decoder.parameters()) for model in models)
    largest = max(sizes, default=0)
    compiles = pool.compile == "always" or (pool.compile == "auto" and largest >= MIN_COMPILED_BYTES)
    for model in models:
        is_captured = pool.capture != "never" and model.capture(fuses=compiles)
        if pool.capture == "always" and not is_captured:
            raise ConfigError(
                f"pool.capture: {model.name} cannot be captured: that takes one CUDA device, "
                f"and it is on {model.device}"
            )
        is_compiled = compiles and model.compile()
        if pool.compile == "always" and not is_compiled:
            raise ConfigError(
                f"pool.compile: {model.name} cannot be compiled: that takes layers of one make, and captured steps on "
                "a GPU, or bfloat16 or float32 weights on a CPU; take 'auto'"
            )
