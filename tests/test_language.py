"""Docstrings and comments use the terms of the field; see CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("jobs", "pipeline", "actors", "decoding", "models", "configs", "files")
PACKAGES = (*CODE, "zoo", "docgen", "benchmarks", "tests")
AVOIDED = re.compile(
    r"\b([Ww]hoever|[Nn]obody|[Ss]omebody|[Nn]owhere|[Hh]ardly|[Tt]ells?|[Tt]old|[Ss]ays?|[Ss]aying|[Ll]ies|[Ss]tands?|"
    r"[Ss]tood|[Kk]nows (?:no|nothing|of)|[Pp]atience|doneset|flight log|settl(?:es|ed|ing)|coming prompts|"
    r"made ahead|large pages|depth rates|step paces|have it that)\b"
)


def texts_of(source: str) -> list[tuple[int, str]]:
    """Line and text of every docstring, attribute docstring and comment."""
    docstrings = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return docstrings + [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def avoided_in(source: str) -> list[tuple[int, str]]:
    """Line and word of every avoided term; names in backticks and quoted text do not count."""
    return [
        (line, match[0])
        for line, text in texts_of(source)
        for match in AVOIDED.finditer(re.sub(r"`[^`]*`|\"[^\"]*\"", "", text))
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_and_comments_use_plain_terms(package: str) -> None:
    result = {
        path.relative_to(ROOT).as_posix(): words
        for path in sorted((ROOT / package).rglob("*.py"))
        if (words := avoided_in(path.read_text(encoding="utf-8")))
    }
    assert result == {}


def test_an_avoided_term_is_found() -> None:
    source = '"""Whoever `tells` this."""\nx = 1  # what it says\n"""Stored "as it stands"."""\n'
    assert avoided_in(source) == [(1, "Whoever"), (2, "says")]
