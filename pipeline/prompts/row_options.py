"""Builds each row's prompts, from the job's prompt or the row's conversation, and its sampling values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.load import ConfigError
from configs.schema import CaptionJobConfig, PromptConfig, RowColumnsConfig, SamplingConfig
from pipeline.prompts import templates
from pipeline.prompts.conversations import place_media, read_conversation, read_marks
from pipeline.prompts.sampling import read_sampling, sampling_names
from pipeline.rows.schemas import RowError

PROMPT_FIELD = "prompt"
"""The template placeholder that each of a row's several prompts replaces."""
MAX_PROMPTS = 1024


@dataclass(frozen=True)
class RowPrompt:
    """One prompt of a row. `index` is its place in the row's list of `num_asked` prompts; both are None without a list.
    `sampling` is a JSON object of the row's own seed and sampling values, or empty."""

    messages: list[dict[str, Any]]
    index: int | None
    sampling: str
    num_asked: int | None = None

    def name(self, sample_id: str) -> str:
        """Return the id of the result row; `<id>#index` if the row has a list of prompts."""
        return sample_id if self.index is None else f"{sample_id}#{self.index}"


@dataclass(frozen=True)
class PromptOptions:
    """Prompt options of the job file, and the special tokens that column values must not contain."""

    prompt: PromptConfig | None = None
    columns: RowColumnsConfig = field(default_factory=RowColumnsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    special_tokens: tuple[str, ...] = ()
    drops_answers: bool = True
    """Whether assistant turns at the end of a row's conversation are left out."""
    reads_marks: bool = True
    """Whether `<image>` and `<video>` in texts of OpenAI's form may be places of the row's media."""

    @classmethod
    def of(cls, job: CaptionJobConfig, special_tokens: Sequence[str] = ()) -> PromptOptions:
        rules = job.source.final_answers == "drop", job.source.content_marks == "read"
        prompt = job.prompt if job.prompt is not None and job.prompt.has_turns else None
        return cls(prompt, job.columns, job.sampling, job.job.seed, tuple(special_tokens), *rules)

    @property
    def has_conversations(self) -> bool:
        """Whether prompts are conversations in the rows."""
        return self.columns.messages is not None

    def fields(self) -> dict[str, str]:
        """Return the columns that rows must have, each with the dotted path that first names it."""
        named: dict[str, str] = {}
        if self.prompt is not None:
            templates.check(self.prompt)
            named = templates.placeholders(self.prompt)
        if self.columns.prompts is not None and named.pop(PROMPT_FIELD, None) is None:
            raise ConfigError(f"columns.prompts: no template contains {{{PROMPT_FIELD}}}, the placeholder of a prompt")
        for field_name, column in self.columns.model_dump(exclude_none=True).items():
            named.setdefault(column, f"columns.{field_name}")
        return named

    def ask(
        self, fields: Mapping[str, Any], images: Sequence[Any], videos: Sequence[Any]
    ) -> tuple[list[RowPrompt], list[Any], list[Any]]:
        """Return a row's prompts, images and videos, in placeholder order; URIs from a conversation are strings."""
        names = ["seed", *sampling_names(self.columns, self.sampling)]
        names = [name for name in names if getattr(self.columns, name) is not None]
        options = read_sampling(fields, self.columns, self.sampling, self.seed) if names else {}
        sampling = json.dumps({name: options[name] for name in names}) if names else ""
        if self.columns.messages is not None:
            column = self.columns.messages
            conversation = read_conversation(fields.get(column), column, self.drops_answers)
            read_marks(conversation, len(images), len(videos), self.reads_marks)
            own_images = place_media(conversation, "image", images, column)
            own_videos = place_media(conversation, "video", videos, column)
            for message in conversation.messages:
                parts = [part for part in message["content"] if part["type"] == "text"]
                texts = templates.neutralise_parts([part["text"] for part in parts], self.special_tokens)
                for part, text in zip(parts, texts, strict=True):
                    part["text"] = text
            return [RowPrompt(conversation.messages, None, sampling)], own_images, own_videos
        assert self.prompt is not None, "the schema requires a prompt if rows have no conversation"
        rounds = self._rounds(fields)
        asked = []
        for index, values in enumerate(rounds):
            messages = templates.fill(self.prompt, values, len(images), len(videos), self.special_tokens)
            index_and_number = (None, None) if self.columns.prompts is None else (index, len(rounds))
            asked.append(RowPrompt(messages, index_and_number[0], sampling, index_and_number[1]))
        return asked, list(images), list(videos)

    def _rounds(self, fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the template fields for each of a row's prompts."""
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
        return [{**fields, PROMPT_FIELD: prompt} for prompt in value]
