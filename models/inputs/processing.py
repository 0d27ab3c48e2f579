"""Encode prompts with the chat template, tokenizer, image and video processor of a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from models.inputs import video
from models.inputs.chat_template import ANSWER_PREFIX, ChatTemplate
from models.inputs.clip import Clip
from models.inputs.content import Content, Recent
from models.inputs.packing import PackedInputs, PixelScale, pack
from models.inputs.useful_side import useful_side_px

ELSEWHERE = frozenset(
    ("name_or_path", "vocab_file", "tokenizer_file", "merges_file", "is_local", "local_files_only", "chat_template")
)
"""Tokenizer settings that do not change token ids."""
MAX_REASON_CHARS = 500
"""Characters of a template's own error message that are kept."""


class PromptError(ValueError):
    """Raised if a prompt cannot be encoded, such as for a wrong number of images, a template error or no tokens."""


class FrontEnd:
    """Common interface of processors (vision-language models) and tokenizers (text models).

    `template_options` are values that the chat template reads besides the messages.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.takes_images = self.tokenizer is not processor
        self.takes_videos = isinstance(getattr(processor, video.VIDEO_PART, None), video.VideoProcessor)
        self.template_options: Mapping[str, Any] = {}
        self._leader: FrontEnd | None = None
        self._recent: Recent[dict[str, Tensor]] = Recent(0)
        # Target and drafter may share this object and encode prompts on different threads.
        self._is_used = threading.Lock()

    def keep(self, max_bytes: int) -> None:
        """Cache up to `max_bytes` of processor outputs, for a second model that encodes the same prompts."""
        self._recent = Recent(max_bytes)

    def reads_like(self, other: FrontEnd) -> bool:
        """Return whether processors, settings and tokenizers are equal; False if tokenizers cannot be compared."""
        mine = self._settings()
        return mine is not None and mine == other._settings()

    def _settings(self) -> tuple[Any, ...] | None:
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        options = {name: str(value) for name, value in self.tokenizer.init_kwargs.items() if name not in ELSEWHERE}
        return type(self.processor), core.to_str(), options, self.processor.to_dict() if self.takes_images else None

    @property
    def useful_side_px(self) -> int | None:
        """See `models.inputs.useful_side`; None if unknown."""
        return useful_side_px([part for part in self._parts() if part is not None]) if self.takes_images else None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Strings that are tokenized as one special token anywhere in a text, placeholders of media included."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        markers = (getattr(self.processor, f"{kind}_token", None) for kind in ("image", "video", "audio"))
        tokens = {token.content for token in added if token.special} | {*self.tokenizer.all_special_tokens, *markers}
        return tuple(sorted(text for text in tokens if isinstance(text, str) and text))

    @property
    def reads_chats(self) -> bool:
        """Whether prompts are rendered chats of a text model, which contain all their special tokens."""
        if self._leader is not None:
            return self._leader.reads_chats
        return not self.takes_images and bool(getattr(self.tokenizer, "chat_template", None))

    def follow(self, other: FrontEnd) -> None:
        """Encode the prompts that `other` renders."""
        self._leader = other

    def special_tokens_option(self, prompt: str) -> dict[str, bool]:
        """Return the option of the tokenizer or processor with which it encodes a prompt as transformers does.

        `apply_chat_template` of tokenizers adds no special tokens to a chat. That of processors lets the processor add
        them unless the template writes the BOS; a text without a chat template is encoded likewise.
        """
        bos = self.tokenizer.bos_token
        begins = bos is not None and prompt.startswith(bos) and (bool(bos) or self.takes_images)
        return {"add_special_tokens": False} if self.reads_chats or begins else {}

    @property
    def special_tokens_changed(self) -> bool:
        """Whether chats are encoded otherwise than by versions that let tokenizers add special tokens to all chats
        without a BOS."""
        bos = self.tokenizer.bos_token
        try:
            prompt = self.render([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
            before = {"add_special_tokens": not (bos and prompt.startswith(bos))}
            options = (before, self.special_tokens_option(prompt))
            then, now = (list(self.processor(text=prompt, **option)["input_ids"]) for option in options)
        except Exception:  # no chat template, or a processor that refuses prompts without images
            return False
        return then != now

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """Render messages and the generation prompt with the chat template; raises PromptError on failure.

        The text of a last turn with the role `ANSWER_PREFIX` follows the generation prompt, so that the answer begins
        with it.
        """
        turns: list[dict[str, Any]] = list(messages)
        if turns and turns[-1]["role"] == ANSWER_PREFIX:
            return self.render(turns[:-1]) + _plain_text(turns[-1]["content"])
        if not self.takes_images:
            turns = [{**turn, "content": _plain_text(turn["content"])} for turn in turns]
        try:
            if (template := ChatTemplate.of(self.processor)) is not None:
                return template.render(turns, self.template_options)
            options = {"tokenize": False, "add_generation_prompt": True}
            return str(self.processor.apply_chat_template(turns, **{**self.template_options, **options}))
        except Exception as error:  # templates are programs that may raise any error
            reason = str(error)[:MAX_REASON_CHARS]
            raise PromptError(f"the chat template refuses these messages: {reason}") from error

    def unread_options(self, names: Collection[str]) -> list[str]:
        """Return those of `names` that the chat template does not read as options; none if that is unknown."""
        return ChatTemplate.unread(self.processor, names)

    def encode(
        self, prompt: str, images: Sequence[NDArray[np.uint8]], videos: Sequence[Clip] = ()
    ) -> dict[str, Tensor]:
        """Encode a prompt with uint8 RGB images (height, width, 3) and clips to processor outputs with batch axis 1.

        Raises: PromptError if images or videos are unsupported, the processor fails, or there are no tokens.
        """
        with self._is_used:
            if not self._recent.max_bytes:
                return self._encode(prompt, images, videos)
            content = Content.shown(images, videos, prompt)
            outputs = self._recent.get(content)
            if outputs is None:
                outputs = self._encode(prompt, images, videos)
                self._recent.keep(content, outputs, sum(tensor.nbytes for tensor in outputs.values()))
            # Callers may replace these tensors, but must not write to them.
            return dict(outputs)

    def _encode(self, prompt: str, images: Sequence[NDArray[np.uint8]], videos: Sequence[Clip]) -> dict[str, Tensor]:
        if images and not self.takes_images:
            raise PromptError(f"the model takes text only, but the sample has {len(images)} image(s)")
        if videos and not self.takes_videos:
            raise PromptError(f"the model takes no videos, but the sample has {len(videos)}")
        media: dict[str, Any] = {}
        if images:
            media["images"] = [Image.fromarray(image) for image in images]
        if videos:
            media["videos"] = [clip.frames for clip in videos]
            media["video_metadata"] = [video.metadata(clip) for clip in videos]
        try:
            inputs = self.processor(text=prompt, return_tensors="pt", **self.special_tokens_option(prompt), **media)
        except Exception as error:  # third-party processors may raise any error; fail the row, not the job
            raise PromptError(f"the processor refuses the prompt: {error}") from error
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        if tensors["input_ids"].shape[1] == 0:
            raise PromptError("the prompt holds no tokens")
        return tensors

    def pack(self, prompt: str, images: Sequence[NDArray[np.uint8]], videos: Sequence[Clip] = ()) -> PackedInputs:
        """Encode a prompt as `encode` does, and pack the outputs without loss; raises the errors of `encode`."""
        scales = {is_video: PixelScale.of(part) for is_video, part in enumerate(self._parts())}
        outputs = self.encode(prompt, images, videos)
        tensors = {name: pack(value, scales[name.endswith("_videos")]) for name, value in outputs.items()}
        return PackedInputs(tensors, len(images), tuple(len(clip.frames) for clip in videos))

    def _parts(self) -> tuple[Any, Any]:
        """Return the image processor and the video processor, or None."""
        image_part, video_part = (getattr(self.processor, name, None) for name in ("image_processor", video.VIDEO_PART))
        return image_part, video_part

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_after(self, prefix: str, token_ids: Sequence[int]) -> str:
        """Return the text of token ids that continue `prefix`, with the space between them that tokenizers leave out at
        the beginning of a text."""
        prefix_ids = list(self.tokenizer(prefix, add_special_tokens=False)["input_ids"])
        before, text = self.decode(prefix_ids), self.decode([*prefix_ids, *token_ids])
        return text[len(before) :] if text.startswith(before) else self.decode(token_ids)


def _plain_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
