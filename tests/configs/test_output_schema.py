"""Numbers of `output.json_schema` that the grammar would change are refused with their path."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError, validate
from configs.output import MAX_EXACT, OutputConfig
from decoding.grammar import Grammar, schema_source
from tests.conformance.grammars import vocabulary

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a maximum": ({"type": "integer", "maximum": 10**30}, "maximum: an integer of 31 digits is beyond"),
    "a maximum beyond 64 bits": ({"maximum": 2**64}, r"maximum: 18446744073709551616 is beyond ±2\*\*53"),
    "a minimum beyond 64 bits": ({"minimum": -(2**63) - 1}, "minimum: -9223372036854775809 is beyond"),
    "a minimum": ({"minimum": 2**63}, "minimum: 9223372036854775808 is beyond"),
    "a constant": ({"properties": {"const": {"const": 2**53 + 1}}}, "properties.const.const: 9007199254740993 is"),
    "a choice": (
        {"items": {"enum": ["a", {"default": [10**400]}]}},
        "items.enum.1.default.0: an integer of 401 digits",
    ),
    "a length": ({"maxLength": 10**30}, "maxLength: an integer of 31 digits"),
    "a reference": (
        {"$defs": {"title": {"maxItems": 2**70}}},
        r"\$defs\.title\.maxItems: 1180591620717411303424 is beyond",
    ),
    "infinity": ({"allOf": [{"maximum": float("inf")}]}, "allOf.0.maximum: inf is no number of JSON"),
    "no number": ({"maximum": float("nan")}, "maximum: nan is no number of JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_number_that_the_grammar_would_change_is_refused_with_its_path(case: str) -> None:
    schema, message = REFUSED[case]
    with pytest.raises(ConfigError, match=rf"^test: json_schema: {message}") as refused:
        validate(OutputConfig, {"json_schema": schema}, "test")
    assert "\n" not in str(refused.value)


def test_a_schema_of_many_levels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"items": ' * 300 + "{}" + "}" * 300)
    with pytest.raises(ConfigError, match=r"json_schema: .*it is nested more than 64 levels deep"):
        validate(OutputConfig, {"json_schema": str(tmp_path / "deep.json")}, "test")
    for text, reason in (
        ('{"maximum": 1e400}', "1e400, which is beyond the range"),
        ('{"maximum": Infinity}', "Infinity"),
    ):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ConfigError, match=f"json_schema: .*s.json is not JSON: .*{reason}"):
            validate(OutputConfig, {"json_schema": str(tmp_path / "s.json")}, "test")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "maximum": 2**63 - 1},
        {"type": "integer", "maximum": 2**64 - 1, "default": 10**30},
        {"type": "integer", "title": "t", "examples": [10**30, 1e308]},
        {"properties": {"default": {"type": "integer"}}, "description": "d"},
        {"const": 2**60},
        {"enum": [True, 1.5, None, -MAX_EXACT]},
    ],
)
def test_usual_numbers_and_remarks_of_any_size_compile(schema: dict[str, Any]) -> None:
    output = validate(OutputConfig, {"json_schema": schema}, "test")
    assert output.json_schema == schema
    Grammar(schema_source(schema), vocabulary())


def test_a_constant_that_is_accepted_is_written_as_it_is() -> None:
    chance, words = random.Random(0), vocabulary()
    values = [chance.randrange(-(2**63), 2**63) >> chance.randrange(64) for _ in range(200)]
    values += [sign * 2**power + more for power in (52, 53, 54, 60, 62) for sign in (1, -1) for more in (-1, 0, 1)]
    num_written = 0
    for value in values:
        try:
            validate(OutputConfig, {"json_schema": {"const": value}}, "test")
        except ConfigError:
            assert abs(value) > MAX_EXACT
            continue
        num_written += 1
        assert Grammar(schema_source({"const": value}), words).count_tokens(f"{value}") is not None, value
    assert num_written > 150
