"""Render conversations with the chat template of a checkpoint, in bounded time and memory.

Templates are programs of strangers, and rows are data of strangers: either can make a loop or a text explode.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from models.inputs.template_meter import METER, Meter, TemplateTooCostly
from models.inputs.template_sandbox import TemplateRefused, compile_template, variables

__all__ = ["ChatTemplate", "TemplateRefused", "TemplateTooCostly"]

ANSWER_PREFIX = "answer_prefix"
"""Role of a last turn that no template renders: its text follows the generation prompt."""
NUM_COMPILED = 16
"""Number of templates that are kept compiled."""
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range")
)
"""Names that have values in every template."""
PROBE = ({"role": "user", "content": "Hi."}, {"role": "user", "content": [{"type": "text", "text": "Hi."}]})
"""Short turns, with which a template is rendered when it is loaded: content as text, and as parts."""


class ChatTemplate:
    """The chat template of a processor or tokenizer of transformers, rendered as its `apply_chat_template` does."""

    def __init__(self, source: str, special_tokens: dict[str, Any]) -> None:
        self._template, self._source, self._special_tokens = _compiled(source), source, special_tokens

    @staticmethod
    def of(processor: Any) -> ChatTemplate | None:
        """Return the template of a processor or tokenizer; None if its own method has to be called, because it has no
        template of jinja, or its class is code of the checkpoint. Raises TemplateRefused."""
        method = getattr(type(processor), "apply_chat_template", None)
        if not str(getattr(method, "__module__", "")).startswith("transformers."):
            return None
        source = getattr(processor, "chat_template", None)
        source = source.get("default") if isinstance(source, dict) else source
        if not isinstance(source, str):
            return None
        return ChatTemplate(source, getattr(processor, "tokenizer", processor).special_tokens_map)

    @staticmethod
    def unread(processor: Any, names: Collection[str]) -> list[str]:
        """Return those of `names` that the template of a processor or tokenizer does not read as options, sorted; none
        if that is unknown, see `of`."""
        if not names or (template := ChatTemplate.of(processor)) is None:
            return []
        read = variables(template._source) - RESERVED - template._special_tokens.keys()
        return sorted(set(names) - read)

    def render(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] | None = None) -> str:
        """Render messages and the generation prompt, with further values that the template reads. Raises
        TemplateTooCostly, and any error that templates raise."""
        meter = Meter(len(messages), _num_units(messages))
        token = METER.set(meter)
        try:
            values = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
            text: str = self._template.render(**self._special_tokens | dict(options or {}) | values)
            meter.expect(len(text))
            return text
        finally:
            METER.reset(token)

    def probe(self) -> None:
        """Raise TemplateTooCostly if a conversation of one short turn costs too much."""
        for turn in PROBE:
            try:
                self.render([turn])
            except TemplateTooCostly:
                raise
            except Exception:  # templates refuse some conversations with errors of any kind
                continue


_compiled = lru_cache(NUM_COMPILED)(compile_template)


def _num_units(messages: Sequence[dict[str, Any]]) -> int:
    """Return the characters of a conversation, and 64 for each part of a turn."""
    num_units = 0
    for turn in messages:
        content = turn.get("content")
        if isinstance(content, str):
            num_units += len(content)
        elif isinstance(content, (list, tuple)):
            num_units += sum(64 + len(part.get("text", "")) for part in content if isinstance(part, dict))
    return num_units
