"""The schema of a training job: heads on a target, taught with the rows of an ordinary source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from configs.schema import Checkpoint, Prompt, Source
from configs.section import Section


class EagleHead(Section):
    """One layer that guesses the target's next state (EAGLE-2)."""

    kind: Literal["eagle"] = "eagle"


class MedusaHead(Section):
    """Heads that each guess one token further ahead."""

    kind: Literal["medusa"] = "medusa"
    num_heads: Annotated[int, Field(ge=1, le=16)] = 4


class Teaching(Section):
    """What is shown, how often, how fast."""

    num_steps: Annotated[int, Field(ge=1)] = 2000
    batch_rows: Annotated[int, Field(ge=1, le=1024)] = 16
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-3
    max_rows: Annotated[int, Field(ge=2)] = 10_000
    """Rows read into memory, encoded; the first of the source."""
    held_out_rows: Annotated[int, Field(ge=1)] = 64
    """The last of them, never trained on: accuracy and acceptance are measured there."""
    max_tokens: Annotated[int, Field(ge=16)] = 1024
    """A row with more is left out, and counted."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


class TrainingOutput(Section):
    """Where the head goes."""

    path: str
    """A local folder, which becomes `model.drafter.path` of a caption job."""


class TrainDrafterJob(Section):
    """A whole training job."""

    source: Source
    prompt: Prompt
    answer_column: str
    """The column of the text that the target is taught to be guessed on."""
    answer_prefix: str = " "
    """Stands between the rendered prompt and the answer, as the target writes it."""
    target: Checkpoint
    head: Annotated[EagleHead | MedusaHead, Field(discriminator="kind")] = EagleHead()
    training: Teaching = Teaching()
    output: TrainingOutput

    @field_validator("prompt", mode="before")
    @classmethod
    def _short_prompt(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value
