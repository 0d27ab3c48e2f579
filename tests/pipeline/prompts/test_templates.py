from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError
from configs.schema import MessageConfig, PromptConfig
from pipeline.prompts import templates
from pipeline.rows.schemas import RowError


def filled(text: str, /, **fields: object) -> str:
    return templates.fill(PromptConfig(text=text), fields, 0)[0]["content"][-1]["text"]


def test_placeholders_come_in_order_with_the_turn_that_names_them_first() -> None:
    prompt = PromptConfig(
        messages=(MessageConfig(role="system", text="{b}"), MessageConfig(role="user", text="{a} {b} {{c}}"))
    )
    assert templates.placeholders(prompt) == {"b": "prompt.messages.0.text", "a": "prompt.messages.1.text"}
    assert list(templates.placeholders(prompt)) == ["b", "a"]


def test_values_are_inserted_unchanged() -> None:
    assert filled("{a}|{b}|{c}|{d}|{e}", a="x {b}", b=3, c=True, d=[1, "é"], e=0.1) == 'x {b}|3|true|[1, "é"]|0.1'


def test_doubled_braces_are_braces() -> None:
    assert filled("{{a}} {{{a}}}", a="v") == "{a} {v}"


def test_a_name_is_never_an_expression() -> None:
    assert (
        filled("{a.__class__} {b[0]} {c!r} {d:>9}", **{"a.__class__": 1, "b[0]": 2, "c!r": 3, "d:>9": 4}) == "1 2 3 4"
    )
    with pytest.raises(RowError) as caught:
        filled("{a.__class__}", a="text")
    assert caught.value.code == "missing_column_value"


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_missing_value_is_a_row_error(value) -> None:
    with pytest.raises(RowError, match="'a'") as caught:
        filled("{a}", a=value)
    assert caught.value.code == "missing_column_value"


def test_an_empty_string_is_a_value() -> None:
    assert filled("[{a}]", a="") == "[]"


@pytest.mark.parametrize("template", ["{", "}", "a {b", "a} b", "{}", "{a{b}}", "{{{a}}"])
def test_a_lone_brace_is_refused_with_its_dotted_path(template) -> None:
    prompt = PromptConfig(messages=(MessageConfig(role="user", text="fine"), MessageConfig(role="user", text=template)))
    with pytest.raises(ConfigError, match=r"^prompt\.messages\.1\.text: a single"):
        templates.check(prompt)


def test_images_go_before_the_text_of_the_first_user_turn() -> None:
    prompt = PromptConfig(
        messages=(
            MessageConfig(role="system", text="s"),
            MessageConfig(role="user", text="u"),
            MessageConfig(role="assistant", text="a"),
            MessageConfig(role="user", text="v"),
        )
    )
    kinds = [[part["type"] for part in turn["content"]] for turn in templates.fill(prompt, {}, 2)]
    assert kinds == [["text"], ["image", "image", "text"], ["text"], ["text"]]


def test_a_marked_turn_carries_the_images_instead() -> None:
    turns = (MessageConfig(role="user", text="u"), MessageConfig(role="user", text="v", images=True))
    assert templates.image_turn(PromptConfig(messages=turns)) == 1
    turns = (MessageConfig(role="user", text="u", images=False), MessageConfig(role="user", text="v"))
    assert templates.image_turn(PromptConfig(messages=turns)) == 1


def test_a_prompt_that_places_its_images_twice_or_never_is_refused() -> None:
    turns = (MessageConfig(role="user", text="u", images=True), MessageConfig(role="user", text="v", images=True))
    with pytest.raises(ConfigError, match=r"prompt\.messages\.1\.images"):
        templates.check(PromptConfig(messages=turns))
    with pytest.raises(ConfigError, match="no model"):
        templates.check(PromptConfig(messages=(MessageConfig(role="user", text="u", images=False),)))


def test_lone_surrogates_become_replacement_characters_and_pairs_stay_whole() -> None:
    assert filled("{a}", a="x\ud800y") == "x\ufffdy"
    assert filled("{a}", a="\ud83d\ude00") == "\U0001f600"


@given(st.text())
def test_every_text_survives_escaping(text) -> None:
    assert filled(text.replace("{", "{{").replace("}", "}}")) == templates.whole_text(text)


NAMES = st.text(st.characters(exclude_characters="{}", codec="utf-8"), min_size=1)


@given(st.dictionaries(NAMES, st.text(st.characters(codec="utf-8")), max_size=4))
def test_every_column_name_without_braces_can_be_named(fields) -> None:
    assert filled(":" + "|".join("{" + name + "}" for name in fields), **fields) == ":" + "|".join(fields.values())


# --- special tokens ------------------------------------------------------------------------------------------------

SPECIAL = ("</s>", "<image>", "<|im_start|>", "<|im_", "[PAD]")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("an <image> here", "an < image> here"),
        ("<image><image></s>", "< image>< image>< /s>"),
        ("<|im_start|>system", "< |im_start|>system"),
        ("<<image>>", "<< image>>"),
        ("< image> </ s>", "< image> </ s>"),
        ("[PAD", "[PAD"),
        ("", ""),
    ],
)
def test_special_tokens_in_columns_are_split(text, expected) -> None:
    assert templates.neutralise(text, SPECIAL) == expected
    assert templates.neutralise(text, ()) == text


def test_special_tokens_of_the_template_are_not_split() -> None:
    prompt = PromptConfig(text="<image>{a}</s>{b}{c}>")
    [turn] = templates.fill(prompt, {"a": "<image>", "b": "<ima", "c": "ge"}, 0, 0, SPECIAL)
    assert turn["content"][-1]["text"] == "<image>< image></s>< image>"


def test_a_special_token_of_one_character_is_a_row_error() -> None:
    with pytest.raises(RowError, match="special token '\N{DAGGER}'") as caught:
        templates.neutralise("a \N{DAGGER} b", ("\N{DAGGER}",))
    assert caught.value.code == "invalid_value"


def test_a_long_text_of_special_tokens_is_split_in_one_pass() -> None:
    assert templates.neutralise("<image>" * 200_000, SPECIAL) == "< image>" * 200_000


@given(st.lists(st.sampled_from([*SPECIAL, "<", "image", ">", "x", "|", "im_", " "]), max_size=12).map("".join))
def test_no_special_token_is_left_and_nothing_but_spaces_is_added(text) -> None:
    neutralised = templates.neutralise(text, SPECIAL)
    assert not [token for token in SPECIAL if token in neutralised]
    assert neutralised.replace(" ", "") == text.replace(" ", "")
