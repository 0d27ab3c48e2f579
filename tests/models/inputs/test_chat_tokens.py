"""A chat has the tokens of transformers' `apply_chat_template`, for every shape of tokenizer and processor."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaTokenizer, LlavaProcessor, PreTrainedTokenizerFast

from configs.schema import MessageConfig, PromptConfig, RowColumnsConfig
from decoding.contexts.text import prompt_tokens
from decoding.types import Request
from models.inputs.processing import FrontEnd
from models.target import Target
from pipeline.prompts.row_options import PromptOptions
from tests import toys
from tests.models.architectures import make as make_tiny
from zoo.real_vision.model import build_processor

SPECIAL = ("[gMASK]", "<sop>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
WORDS = ("w5", "w6", "w7", "Describe", "it", "\n", "a", "b")
TURNS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "no prefix": TURNS,
    "bos": "{{ bos_token }}" + TURNS,
    "two tokens": "[gMASK]<sop>" + TURNS,
    "space before bos": " {{ bos_token }}" + TURNS,
    "eos behind": TURNS + "{{ eos_token }}",
    "generation": (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
}
LAYOUTS = {
    "none": None,
    "bos": "<s> $A",
    "two tokens": "[gMASK] <sop> $A",
    "eos": "$A </s>",
    "both ends": "<s> $A </s>",
}
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Describe it"}],
    [{"role": "system", "content": "w5"}, {"role": "user", "content": "\nw6 it"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": " w7"}],
)


def word_level() -> Tokenizer:
    words = {word: number for number, word in enumerate(("<unk>", *SPECIAL, *WORDS))}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return core


def byte_level(add_prefix_space: bool = False) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate(("<unk>", *SPECIAL, *letters, "Ġa", "it"))}
    core = Tokenizer(models.BPE(words, [("Ġ", "a"), ("i", "t")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    return core


def sentence_pieces() -> Tokenizer:
    """A Unigram model with the dummy prefix of SentencePiece."""
    pieces = [
        ("<unk>", 0.0),
        *((token, 0.0) for token in SPECIAL),
        *((token, -3.0) for token in ("▁", "▁it", "▁w5", "Describe")),
    ]
    core = Tokenizer(models.Unigram([*pieces, *((chr(token_id), -9.0) for token_id in range(33, 127))], 0, False))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return core


CORES = {
    "words": word_level,
    "bytes": byte_level,
    "bytes, prefix space": lambda: byte_level(True),
    "sentence pieces": sentence_pieces,
}


def make_tokenizer(core: str, layout: str | None, template: str | None, **settings: Any) -> PreTrainedTokenizerFast:
    made = CORES[core]()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    if layout is not None:
        placed = [(token, made.token_to_id(token)) for token in layout.split() if token != "$A"]
        made.post_processor = processors.TemplateProcessing(single=layout, special_tokens=placed)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **tokens | settings)


def of_transformers(reader: Any, messages: Any) -> list[int]:
    """The oracle: what transformers gives a model to answer these messages."""
    tokens = reader.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    return list(tokens[0]) if isinstance(tokens[0], list) else list(tokens)


def ours(reader: Any, messages: Any, images: Any = ()) -> list[int]:
    front_end = FrontEnd(reader)
    ids: list[int] = front_end.encode(front_end.render(messages), images)["input_ids"][0].tolist()
    return ids


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_has_the_tokens_of_apply_chat_template(core: str, layout: str, template: str) -> None:
    tokenizer = make_tokenizer(core, LAYOUTS[layout], TEMPLATES[template])
    for messages in CONVERSATIONS:
        assert ours(tokenizer, messages) == of_transformers(tokenizer, messages)


def test_the_prefix_of_glm_occurs_once() -> None:
    tokenizer = make_tokenizer("words", "[gMASK] <sop> $A", TEMPLATES["two tokens"])
    ids = ours(tokenizer, CONVERSATIONS[0])
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["[gMASK]", "<sop>", "<|user|>"]
    assert tokenizer.convert_ids_to_tokens(ids).count("<sop>") == 1


def test_no_eos_ends_a_prompt_and_no_bos_begins_one_that_the_template_does_not_write() -> None:
    ids = ours(make_tokenizer("words", "<s> $A </s>", TURNS), CONVERSATIONS[0])
    tokens = make_tokenizer("words", None, TURNS).convert_ids_to_tokens(ids)
    assert tokens == ["<|user|>", "Describe", "it", "<|assistant|>"]


@settings(deadline=None, max_examples=60)
@given(
    core=st.sampled_from(sorted(CORES)),
    layout=st.lists(st.sampled_from(["<s>", "[gMASK]", "<sop>", "</s>"]), max_size=4),
    index=st.integers(0, 4),
    before=st.lists(st.sampled_from(["{{ bos_token }}", "[gMASK]", "<sop>", " ", "\n", "it"]), max_size=3),
    bos=st.sampled_from(["<s>", "[gMASK]", None]),
    texts=st.lists(st.text("ab it w5\n<s>", max_size=12), min_size=1, max_size=3),
    length=st.sampled_from([None, 4]),
)
def test_chats_of_any_layout_have_the_tokens_of_apply_chat_template(
    core: str, layout: list[str], index: int, before: list[str], bos: str | None, texts: list[str], length: int | None
) -> None:
    around = " ".join([*layout[:index], "$A", *layout[index:]])
    template = "".join(before) + TURNS if bos is not None else TURNS
    tokenizer = make_tokenizer(core, around, template, bos_token=bos)
    if length is not None:  # settings of tokenizer.json, which transformers does not use for chats
        tokenizer.backend_tokenizer.enable_truncation(length)
        tokenizer.backend_tokenizer.enable_padding(length=64)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    assert ours(tokenizer, messages) == of_transformers(tokenizer, messages)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
@pytest.mark.parametrize("template", ["no prefix", "bos"])
@pytest.mark.parametrize("add_prefix_space", [True, False])
def test_settings_that_add_tokens_do_not_change_chats(
    add_bos: bool, add_eos: bool, template: str, add_prefix_space: bool
) -> None:
    vocab = {
        token: number for number, token in enumerate(("<unk>", "<s>", "</s>", "▁", *"abdeistwu<|>", *"Dcrb5678nm"))
    }
    tokenizer = LlamaTokenizer(
        vocab=vocab, merges=[], add_bos_token=add_bos, add_eos_token=add_eos, add_prefix_space=add_prefix_space
    )
    tokenizer.chat_template = TEMPLATES[template]
    for messages in CONVERSATIONS:
        assert ours(tokenizer, messages) == of_transformers(tokenizer, messages)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_text_without_a_chat_template_has_the_tokens_of_the_tokenizer(layout: str) -> None:
    tokenizer = make_tokenizer("bytes", LAYOUTS[layout], None)
    ids = FrontEnd(tokenizer).encode("Describe it", ())["input_ids"][0].tolist()
    assert ids == tokenizer("Describe it")["input_ids"]


def test_prompts_and_conversations_of_rows_have_the_tokens_of_apply_chat_template() -> None:
    tokenizer = make_tokenizer("bytes", "<s> $A </s>", TEMPLATES["two tokens"])
    rows = {"word": "it", "talk": json.dumps(CONVERSATIONS[2])}
    turns = (MessageConfig(role="system", text="b"), MessageConfig(role="user", text="a {word}"))
    options = (PromptOptions(PromptConfig(messages=turns)), PromptOptions(None, RowColumnsConfig(messages="talk")))
    expected = ([{"role": "system", "content": "b"}, {"role": "user", "content": "a it"}], CONVERSATIONS[2])
    for option, messages in zip(options, expected, strict=True):
        [asked], *_ = option.ask(rows, (), ())
        assert ours(tokenizer, asked.messages) == of_transformers(tokenizer, messages)


class NoSpecialTokens(LlavaProcessor):
    """A processor whose own default is to add no special tokens, as that of LFM2-VL."""

    def __call__(self, images: Any = None, text: Any = None, add_special_tokens: bool = False, **options: Any) -> Any:
        return super().__call__(images=images, text=text, add_special_tokens=add_special_tokens, **options)


def make_processor(kind: type[LlavaProcessor], layout: str | None, template: str) -> LlavaProcessor:
    tokenizer = make_tokenizer("bytes", layout, None, extra_special_tokens={"image_token": "<image>"})
    whole = build_processor(tokenizer)
    parts = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = kind(whole.image_processor, tokenizer, chat_template=template, **parts)
    assert processor.image_token == "<image>"
    return processor


@pytest.mark.parametrize("kind", [LlavaProcessor, NoSpecialTokens])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bos", ["", "{{ bos_token }}", "[gMASK]"])
def test_a_chat_with_an_image_has_the_tokens_of_the_processor(
    kind: type[LlavaProcessor], layout: str, bos: str
) -> None:
    template = bos + (
        "{% for m in messages %}<|{{ m['role'] }}|>{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}<|assistant|>"
    )
    processor = make_processor(kind, LAYOUTS[layout], template)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    text = {"type": "text", "text": "Describe it"}
    seen = [{"role": "user", "content": [{"type": "image"}, text]}]
    given_ = [{"role": "user", "content": [{"type": "image", "image": Image.fromarray(pixels)}, text]}]
    assert ours(processor, seen, [pixels]) == of_transformers(processor, given_)
    assert ours(processor, [{"role": "user", "content": [text]}]) == of_transformers(
        processor, [{"role": "user", "content": [text]}]
    )


def test_a_drafter_with_another_tokenizer_reads_the_tokens_of_the_target() -> None:
    layout = "<s> $A </s>"
    target = Target(make_tiny("llama", vocab_size=300), FrontEnd(make_tokenizer("bytes", layout, TURNS)))
    smaller = Target(make_tiny("llama", vocab_size=300), FrontEnd(make_tokenizer("bytes", layout, None, extra="b")))
    smaller.share_front_end(target, 1 << 20)
    assert not smaller.reads_inputs, "the front ends must differ"
    prompt = target.front_end.render(CONVERSATIONS[0])
    wanted = of_transformers(target.front_end.tokenizer, CONVERSATIONS[0])
    assert target.encode(prompt, ()).token_ids.tolist() == wanted
    assert smaller.encode(prompt, ()).token_ids.tolist() == wanted
    assert prompt_tokens(Request("0", prompt), smaller) == wanted


@pytest.mark.parametrize(
    ("layout", "template", "changed"),
    [
        (None, "no prefix", False),
        ("<s> $A", "bos", False),
        ("<s> $A </s>", "bos", False),
        ("<s> $A", "no prefix", True),
        ("$A </s>", "no prefix", True),
        ("[gMASK] <sop> $A", "two tokens", True),
    ],
)
def test_the_tokenizers_whose_chats_have_other_tokens_than_before_are_known(
    layout: str | None, template: str, changed: bool
) -> None:
    assert FrontEnd(make_tokenizer("bytes", layout, TEMPLATES[template])).special_tokens_changed is changed
    assert not FrontEnd(make_tokenizer("bytes", layout, None)).special_tokens_changed


def test_a_processor_that_lets_its_tokenizer_add_a_bos_encodes_as_before() -> None:
    assert not toys.front_end("llava").special_tokens_changed
