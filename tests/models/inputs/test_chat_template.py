"""Chat templates are rendered as transformers renders them, and no template or row hangs or takes all memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generate import render_prompt
from actors.results import RowRefused
from models.inputs.chat_template import ChatTemplate, TemplateRefused, TemplateTooCostly
from models.inputs.processing import FrontEnd, PromptError
from models.inputs.template_meter import MAX_ADDED_UNITS, MAX_DEPTH, METER, Meter
from models.loading.checkpoints import CheckpointError, CheckpointRef, read_config, read_processor
from tests import toys
from tests.models.inputs.published_templates import TEMPLATES

TEXT = "Describe  the picture.\n<think>\nno\n</think>\n "


def front_end(template: str, family: str = "llama") -> FrontEnd:
    processor = copy.deepcopy(toys.processor(family))  # other tests use the same one
    processor.chat_template = template
    return FrontEnd(processor)


def turns(num_rounds: int, text: str = TEXT, with_image: bool = False) -> list[dict[str, Any]]:
    """A conversation that alternates between user and assistant and ends with the user."""
    content: Any = [{"type": "image"}, {"type": "text", "text": text}] if with_image else text
    pair = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    return [*pair * (num_rounds - 1), pair[0]]


# --- equality with transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "llava"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_render_as_in_transformers(name: str, family: str) -> None:
    ours = front_end(TEMPLATES[name], family)
    system = [{"role": "system", "content": "Be brief."}]
    for num_rounds in (1, 2, 5):
        for before in ([], system):
            messages = before + turns(num_rounds)
            expected = ours.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert ours.render(messages) == expected
            assert TEXT.strip() in expected


@pytest.mark.parametrize("name", ["qwen 2.5 vl", "gemma 3", "macros"])
def test_parts_with_images_render_as_in_transformers(name: str) -> None:
    ours = front_end(TEMPLATES[name], "llava")
    messages = turns(3, with_image=True)
    expected = ours.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == expected
    assert "image" in expected


def test_refusals_of_a_template_are_those_of_transformers() -> None:
    ours = front_end(TEMPLATES["gemma 3"])
    messages = [{"role": "assistant", "content": "a"}]
    with pytest.raises(PromptError, match="refuses these messages: Conversation roles must alternate"):
        ours.render(messages)


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=40)), min_size=1, max_size=6)
)
def test_any_conversation_renders_as_in_transformers(rows: list[tuple[str, str]]) -> None:
    ours = front_end(TEMPLATES["macros"])
    messages = [{"role": role, "content": text} for role, text in rows]
    expected = ours.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.render(messages) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 3",
        "[1, 2] * 2 + [3]",
        "7 // 2 ~ '|' ~ 7 % 4 ~ '|' ~ 2 ** 10 ~ '|' ~ 1 / 4 ~ '|' ~ -3",
        "'%s and %5.2f' % ('x', 1.5)",
        "'%(a)s%(a)s' % {'a': 'x'}",
        "'{:>5}|{0[1]}|{b!r}'.format([1, 2], b='x') if false else '{:>5}|{b!r}'.format(1, b='x')",
        "'a,b,,c'.split(',')",
        "' a  b '.split(none, 1)",
        "'a\\nb\\r\\nc'.splitlines()",
        "'aXbX'.replace('X', '--', 1) ~ 'ab'.center(6) ~ '7'.zfill(3) ~ '-'.join(['a', 'b'])",
        "'abc'[1:] ~ [1, 2, 3][::-1]|join ~ 'abc'[-1]",
        "1 < 2 < 3 and 'a' in 'abc' and 'b' not in ['a'] and {'a': 1} == {'a': 1}",
        "messages|map(attribute='content')|map('upper')|join('/')",
        "[3, 1, 2]|sort(reverse=true)|list ~ [1, 1, 2]|unique|list ~ [1, 2, 3]|batch(2, 0)|list",
        "[1, 2, 3, 4]|select('odd')|list ~ [1, 2]|reject('equalto', 1)|list ~ [1, 2, 3]|slice(2)|list",
        "{'b': 1, 'a': [2, none, true]}|tojson(indent=2) ~ {'b': 1}|dictsort ~ {'b': 1}|items|list",
        "'a\\nb'|indent(2, true) ~ 'abcdef'|truncate(4) ~ 'x y'|title ~ '5'|int + 1 ~ 2.678|round(1)",
        "[1, 2]|sum ~ [{'a': 1}, {'a': 2}]|sum(attribute='a') ~ [2, 1]|min ~ 'ba'|list ~ (1, 2)|last",
        "dict(a=1).get('b', 'c') ~ namespace(x=[1]).x ~ range(2, 8, 3)|list ~ '<b>'|e ~ '&'|safe",
        "missing|default('d') ~ missing ~ messages[0].missing ~ none",
        "strftime_now('%%')",
    ],
)
def test_an_expression_has_the_value_that_transformers_gives_it(expression: str) -> None:
    ours = front_end("{{ " + expression + " }}")
    messages = turns(2)
    assert ours.render(messages) == ours.processor.apply_chat_template(messages, tokenize=False)


def test_a_long_honest_conversation_is_rendered() -> None:
    ours = front_end(TEMPLATES["qwen 3"])
    text = "word </think> 漢字\n" * 1_000_000
    assert len(text) > 2**24
    assert ours.render([{"role": "user", "content": text}]).count("漢字") == 1_000_000
    assert ours.render(turns(500)).count("<|im_start|>") == 1000


@pytest.mark.parametrize(
    "expression",
    [
        *("text|tojson|length", "'<{}>'.format(text)|length", "('%s.' % text)|length", "[text, text]|join('-')|length"),
        *(
            "text|indent(2)|length",
            "text.split('\n')|length",
            "text.replace('word', 'w')|length",
            "text|trim|upper|length",
        ),
        *("(text ~ text)|length", "text.splitlines()|last|length", "('x' in text) ~ (text == text ~ '')"),
    ],
)
def test_an_operation_on_a_text_of_16_mib_is_accepted(expression: str) -> None:
    ours = front_end("{% set text = messages[0].content %}{{ " + expression + " }}")
    messages = [{"role": "user", "content": "a word of a row\n" * 2**20}]
    assert ours.render(messages) == ours.processor.apply_chat_template(messages, tokenize=False)


# --- templates and rows that explode -------------------------------------------------------------------------------

EXPLOSIONS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that takes nothing": "{% for a in range(99999) if a is none %}{% endfor %}",
    "a text of 6 GB": "{{ 'a' * 6000000000 }}",
    "a list of many texts": "{{ ['a' * 1000] * 1000000 }}",
    "a number of 3 GB": "{{ 10 ** 9999999999 }}",
    "a number that doubles": "{% set n = namespace(x=9) %}{% for i in range(40) %}{% set n.x = n.x ** 2 %}{% endfor %}",
    "a width": "{{ '%09999999999d' % 1 }}",
    "a width as an argument": "{{ '%*d' % (9999999999, 1) }}",
    "a filter's width": "{{ '%9999999999d'|format(1) }}",
    "a format's width": "{{ '{:>9999999999}'.format(1) }}",
    "a nested format's width": "{{ '{0:{1}}'.format(1, 9999999999) }}",
    "a format reached by a filter": "{% for f in ['{:>9999999999}']|groupby('format') %}{{ f.grouper(1) }}{% endfor %}",
    "a format that repeats": "{{ ('{0}' * 20000).format('x' * 100000) }}",
    "center": "{{ 'a'.center(10 ** 10) }}",
    "the filter center": "{{ 'a'|center(10 ** 10) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "the filter replace": "{{ ('a' * 100000)|replace('', 'b' * 100000) }}",
    "join": "{{ ('x' * 100000).join(['a'] * 10000) }}",
    "the filter join": "{{ (['a'] * 10000)|join('x' * 100000) }}",
    "indent": "{{ ('\\n' * 1000)|indent(10 ** 8) }}",
    "tojson": "{{ {'a': 1}|tojson(indent=10 ** 9) }}",
    "batch": "{{ [1]|batch(10 ** 9, 'x')|list }}",
    "slice": "{{ [1]|slice(10 ** 9)|list }}",
    "round": "{{ 1.5|round(10 ** 9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 10000)|sum(start=[]) }}",
    "a large range": "{{ range(10 ** 12)|list }}",
    "a date": "{{ strftime_now('%9999999999Y') }}",
    "lorem ipsum": "{{ lipsum(n=10 ** 9) }}",
    "texts that double": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "lists that double": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "tuples that double": "{% set n = namespace(x=(1,)) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}"
    "{% endfor %}{{ {n.x: 1} }}",
    "namespaces that double": "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set m = namespace(a=n.x, b=n.x) %}{% set n.x = m %}{% endfor %}{{ n }}",
    "a namespace of itself": "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
    "keys": "{{ dict.fromkeys(range(40000), 'x' * 1000000) }}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "bounded recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive loop": "{% for a in [[]] recursive %}{{ loop([[]]) }}{{ loop([[]]) }}{% endfor %}",
    "text of a loop": "{% for a in range(40000) %}" + "x" * 100_000 + "{% endfor %}",
    "text of a block": "{% set x %}{% for a in range(40000) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
    "text of a macro": "{% macro m() %}"
    + "x" * 100_000
    + "{% endmacro %}{% for a in range(40000) %}{{ m() }}{% endfor %}",
    "copies": "{% set s = 'a' * 1000000 %}{% for i in range(9999) %}{% set x = s[1:] %}{% endfor %}",
    "comparisons": "{% set s = 'a' * 1000000 %}{% set t = s ~ '' %}{% for i in range(49999) %}{{ s == t }}{% endfor %}",
    "searches": "{% set s = 'a' * 1000000 %}{% for i in range(49999) %}{{ 'b' in s }}{% endfor %}",
    "filters over filters": "{% for i in range(99) %}{{ range(999)|map('string')|map('upper')|join }}{% endfor %}",
    "steps given back": "{{ [-1000000000]|map('counted_steps')|list }}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("family", ["llama", "llava"])
@pytest.mark.parametrize("template", EXPLOSIONS.values(), ids=EXPLOSIONS)
def test_a_template_that_exceeds_its_limits_becomes_an_error_of_the_row(template: str, family: str) -> None:
    with pytest.raises(PromptError, match="the chat template refuses these messages: "):
        front_end(template, family).render([{"role": "user", "content": "Hi."}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content * messages[0].content|length }}",
        "{% for a in messages[0].content %}{% for b in messages[0].content %}{% endfor %}{% endfor %}",
        "{{ messages[0].content|replace('a', messages[0].content) }}",
        "{% for w in messages[0].content.split('a') %}{{ w }}{% endfor %}",
    ],
)
def test_a_row_with_which_a_template_exceeds_its_limits_gets_a_stable_code(template: str) -> None:
    ours = front_end(template)
    assert ours.render([{"role": "user", "content": "b" * 2}]) is not None
    with pytest.raises(RowRefused) as raised:
        render_prompt(ours.render, [{"role": "user", "content": "a" * 1_000_000}])
    assert raised.value.code == "prompt_refused"


def test_a_message_of_a_template_is_cut() -> None:
    with pytest.raises(PromptError) as raised:
        front_end("{{ raise_exception('x' * 1000000) }}").render(turns(1))
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("x" * (128 * 1024 + 1), "at most 131,072 are compiled"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
        ("{{ 1" + " + 1" * 20_000 + " }}", "parts"),
        ("".join(f"{{% if x{i} %}}{{% set y{i} = 1 %}}{{% endif %}}" for i in range(2500)), "7,501 names|5,000 names"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
        ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "nested"),
        ("{% include 'other' %}", "statement"),
        ("{% autoescape true %}{{ 1 }}{% endautoescape %}", "statement"),
        ("{{ messages|urlize }}", "No filter named 'urlize'"),
        ("{% for %}", "Expected an expression"),
    ],
    ids=["length", "depth", "parts", "statements", "digits", "loops", "include", "autoescape", "filter", "syntax"],
)
def test_a_template_that_cannot_be_compiled_in_bounds_is_refused(template: str, reason: str) -> None:
    with pytest.raises(TemplateRefused, match=reason):
        ChatTemplate(template, {})


def test_a_checkpoint_with_such_a_template_is_refused_by_its_name(tmp_path: Any) -> None:
    toys.save("llama", tmp_path)
    ref = CheckpointRef(str(tmp_path))
    for template in (EXPLOSIONS["nested loops"], EXPLOSIONS["a text of 6 GB"], "{% for %}", "{% include 'x' %}"):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(CheckpointError, match="its chat template is refused: "):
            read_processor(ref, read_config(ref))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only with a system turn') }}")
    assert read_processor(ref, read_config(ref)).chat_template.startswith("{{ raise")


# --- the meter -----------------------------------------------------------------------------------------------------


def test_a_value_may_be_as_large_as_the_meter_allows_and_no_larger() -> None:
    meter = Meter(1, 10)
    assert meter.largest == MAX_ADDED_UNITS + 40
    meter.expect(meter.largest)
    with pytest.raises(TemplateTooCostly):
        meter.expect(meter.largest + 1)
    nested: list[Any] = []
    for _ in range(MAX_DEPTH - 2):
        nested = [nested]
    meter.size(nested)
    with pytest.raises(TemplateTooCostly, match="levels"):
        meter.size([nested])


def test_steps_end_exactly_at_their_number() -> None:
    meter = Meter(1, 0)
    meter.step(meter.steps)
    with pytest.raises(TemplateTooCostly):
        meter.step()


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda children: st.lists(children) | st.dictionaries(st.text(), children),
        max_leaves=6,
    )
)
def test_the_size_of_a_value_bounds_its_text(value: Any) -> None:
    meter = Meter(1, 0)
    assert len(str(value)) <= meter.text_size(value)


def test_the_meter_is_removed_after_a_rendering() -> None:
    template = ChatTemplate("{{ 'a' * 6000000000 }}", {})
    with pytest.raises(TemplateTooCostly):
        template.render(turns(1))
    with pytest.raises(LookupError):
        METER.get()
