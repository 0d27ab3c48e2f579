"""Maps tables of prepared prompts to tables of image codes, in the same order, as a Ray Data actor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.engine_actor import EngineActor, row_id
from actors.results import RowRefused
from actors.serving.engine_thread import end_process
from configs.synthesis import SynthesizeJobConfig
from decoding.types import Completion, Request, Sampling
from models.inputs.content import ConditionPair

if TYPE_CHECKING:
    from actors.loading.image_pair import ImagePair

LoadPair = Callable[[SynthesizeJobConfig, int | None], "ImagePair"]


class Synthesize(EngineActor[SynthesizeJobConfig, "ImagePair"]):
    """Maps rows of the stage `prepared` to image requests, and completions to rows of codes.

    Every prompt is encoded once and becomes `sampling.num_images_per_prompt` adjacent rows with the ids `<id>#0`,
    `<id>#1`, …. A row with an error becomes as many error rows. Images with ids in `present` are skipped.
    """

    request_columns: tuple[str, ...] = (
        *("sample_id", "prompt", "label", "error_type"),
        *("seed", "temperature", "top_k", "top_p", "guidance_scale"),
    )

    def __init__(
        self, config: SynthesizeJobConfig, *arguments: Any, present: frozenset[str] = frozenset(), **more: Any
    ) -> None:
        self.present = present
        self.rows_per_input = config.sampling.num_images_per_prompt
        if config.has_negatives:
            self.request_columns = (*self.request_columns, "negative_prompt")
        self._encoding = threading.Lock()
        super().__init__(config, *arguments, **more)

    def _arrays(self, table: pa.Table) -> Callable[[int], Any]:
        features = table.column("features")

        def features_of(index: int) -> NDArray[np.float32] | None:
            cell = features[index]
            if not cell.is_valid:
                return None
            numbers = np.frombuffer(cell["values"].as_buffer(), "<f4").astype(np.float32)
            return numbers.reshape(cell["num_tokens"].as_py(), -1)

        return features_of

    def _row_requests(self, row: dict[str, Any], arrays: Callable[[], Any], suspect: str | None) -> dict[int, Request]:
        condition = arrays() if row["label"] is None else int(row["label"])
        if condition is None:
            condition = self._encode(row["prompt"], suspect)
        if (negative := row.get("negative_prompt")) and row["guidance_scale"] > 1.0:
            assert isinstance(condition, np.ndarray), "the schema refuses negative prompts of classes"
            condition = ConditionPair(condition, self._encode_negative(negative, suspect))
        sampling = Sampling(
            max_new_tokens=self._pair.num_image_tokens,
            guidance_interval=self._config.sampling.guidance_interval,
            **{name: row[name] for name in ("temperature", "top_k", "top_p", "guidance_scale")},
        )
        ids = enumerate(row_id(row["sample_id"], replica) for replica in range(self.rows_per_input))
        return {
            replica: Request(
                name, row["prompt"], sampling=sampling, seed=row["seed"], replica=replica, condition=condition
            )
            for replica, name in ids
            if name not in self.present
        }

    def _encode(self, prompt: str, suspect: str | None) -> NDArray[np.float32]:
        """Encode a prompt; if it is a suspect, the ledger records that the text encoder runs it."""
        with self._encoding:
            if suspect is not None:
                self._ledger.running("encode", [suspect])
            try:
                return self._pair.encode(prompt)
            except RowRefused:
                raise
            except Exception as error:  # as for the engine, any other exception means a broken device
                end_process(error)
                raise
            finally:
                if suspect is not None:
                    self._ledger.running("encode", [])

    def _encode_negative(self, negative: str, suspect: str | None) -> NDArray[np.float32]:
        try:
            return self._encode(negative, suspect)
        except RowRefused as error:
            raise RowRefused(error.code, f"negative_prompt: {error}") from None

    def _extra_values(
        self, index: int, row: dict[str, Any], completion: Completion, plain: Completion | None
    ) -> dict[str, Any]:
        replica = index % self.rows_per_input
        return {
            "sample_id": row_id(row["sample_id"], replica),
            "prompt_id": row["sample_id"],
            "replica": replica,
            "status": "error" if completion.error else "success",
            "codes": [] if completion.error else list(completion.token_ids),
        }
