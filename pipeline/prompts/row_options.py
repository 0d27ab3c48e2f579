"""Prompt options per row: the job's prompt or a conversation of the row, one or several, and its sampling values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.load import ConfigError
from configs.schema import CaptionJob, Prompt, RowColumns, Sampling
from pipeline.prompts import templates
from pipeline.prompts.conversations import place_media, read_conversation
from pipeline.prompts.sampling import read_sampling
from pipeline.rows.schemas import RowError

SAMPLED = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")
"""Fields of the sampling section that a row may have values of its own for."""
PROMPT_FIELD = "prompt"
"""What a template calls the one of several prompts that it is filled with."""
MAX_PROMPTS = 1024


@dataclass(frozen=True)
class Asked:
    """One question: chat messages, which of how many prompts of the row it is (None where there is one), its own
    sampling."""

    messages: list[dict[str, Any]]
    index: int | None
    sampling: str
    num_asked: int | None = None

    def name(self, sample_id: str) -> str:
        """The id of this question's row: `<id>#number` for each of several prompts."""
        return sample_id if self.index is None else f"{sample_id}#{self.index}"


@dataclass(frozen=True)
class Asking:
    """Prompt options of the job file, and the texts that column values must not contain."""

    prompt: Prompt | None = None
    columns: RowColumns = field(default_factory=RowColumns)
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    special_tokens: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: CaptionJob, special_tokens: Sequence[str] = ()) -> Asking:
        """The prompt options of a caption job."""
        return cls(job.prompt, job.columns, job.sampling, job.job.seed, tuple(special_tokens))

    def fields(self) -> dict[str, str]:
        """The columns that rows must bring, each with the dotted path that names it first.

        Raises:
            ConfigError: a template cannot be filled by any row.
        """
        named: dict[str, str] = {}
        if self.prompt is not None:
            templates.check(self.prompt)
            named = templates.placeholders(self.prompt)
        if self.columns.prompts is not None and named.pop(PROMPT_FIELD, None) is None:
            raise ConfigError(f"columns.prompts: no template holds {{{PROMPT_FIELD}}}, which stands for each of them")
        for what in ("prompts", "messages", "seed", *SAMPLED):
            name = getattr(self.columns, what)
            if name is not None:
                named.setdefault(name, f"columns.{what}")
        return named

    def own_sampling(self, fields: Mapping[str, Any]) -> str:
        """A row's own sampling values as a JSON object; empty where the job has no columns for them.

        Raises:
            RowError: `invalid_sampling`.
        """
        names = [name for name in ("seed", *SAMPLED) if getattr(self.columns, name) is not None]
        if not names:
            return ""
        values = read_sampling(fields, self.columns, self.sampling, SAMPLED, self.seed)
        return json.dumps({name: values[name] for name in names})

    def ask(
        self, fields: Mapping[str, Any], images: Sequence[Any], videos: Sequence[Any]
    ) -> tuple[list[Asked], list[Any], list[Any]]:
        """A row's prompts, and its media in the order of their placeholders in each.

        `images` and `videos` are the row's own; a URI in a conversation comes as text.

        Raises:
            RowError: `missing_column_value`, `invalid_value` or `invalid_sampling`.
        """
        sampling = self.own_sampling(fields)
        if self.columns.messages is not None:
            column = self.columns.messages
            conversation = read_conversation(fields.get(column), column)
            own_images = place_media(conversation, "image", images, column)
            own_videos = place_media(conversation, "video", videos, column)
            for message in conversation.messages:
                for part in message["content"]:
                    if part["type"] == "text":
                        part["text"] = templates.neutralise(part["text"], self.special_tokens)
            return [Asked(conversation.messages, None, sampling)], own_images, own_videos
        assert self.prompt is not None, "the schema asks for a prompt where no conversation comes with the rows"
        asked, rounds = [], self._rounds(fields)
        for index, own in enumerate(rounds):
            messages = templates.fill(self.prompt, own, len(images), len(videos), self.special_tokens)
            if self.columns.prompts is None:
                asked.append(Asked(messages, None, sampling))
            else:
                asked.append(Asked(messages, index, sampling, len(rounds)))
        return asked, list(images), list(videos)

    def _rounds(self, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The fields for each of a row's prompts."""
        column = self.columns.prompts
        if column is None:
            return [fields]
        value = fields.get(column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise RowError("invalid_value", f"the column {column!r} holds text that is no JSON list") from None
        if value is None or value == []:
            raise RowError("missing_column_value", f"the column {column!r} has no prompts in this row")
        if not isinstance(value, list) or len(value) > MAX_PROMPTS:
            raise RowError("invalid_value", f"the column {column!r} holds no list of up to {MAX_PROMPTS} prompts")
        return [{**fields, PROMPT_FIELD: one} for one in value]
