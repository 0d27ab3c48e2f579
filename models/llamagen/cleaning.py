"""Clean captions as LlamaGen's text models expect: remove parts of web captions that do not describe the image.

The rules and their order equal the published code, oddities included, because the models were trained with them. All
rules are applied twice.
"""

from __future__ import annotations

import html
import io
import re
import urllib.parse

import ftfy
from bs4 import BeautifulSoup


def _compile(rules: list[str | tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    """Compile rules to pairs (pattern, replacement); the replacement of a bare pattern is empty."""
    pairs = [(rule, "") if isinstance(rule, str) else rule for rule in rules]
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


_SUFFIXES = r"png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DOMAIN = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"

# Patterns to remove or replace, in this order; the text is in lower case at this point.
_ADDRESSES = _compile(
    [
        (r"<person>", "person"),
        # Only the scheme is removed here; the rest matches as a domain.
        rf"\b(?:https?:(?:/{{1,3}}|[a-z0-9%])|{_DOMAIN})",
        rf"\b(?:www:(?:/{{1,3}}|[a-z0-9%])|{_DOMAIN})",
    ]
)
_MARKS = _compile(
    [
        r"@\w+",
        # From CJK strokes to the unified ideographs; Hiragana and Katakana are before that range and stay.
        "[\u31c0-\u9fff]+",
        (
            "[\u002d\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0"
            "\ufe31\ufe32\ufe58\ufe63\uff0d]+",
            "-",
        ),
        (r"[`´«»“”¨]", '"'),
        (r"[‘’]", "'"),
        r"&quot;?",
        r"&amp",
        (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # IP addresses
        r"\d:\d\d\s+$",  # times at the end of articles
        (r"\\n", " "),
        r"#\d{1,3}\b",
        r"#\d{5,}\b",
        r"\b\d{6,}\b",
        rf"\S+\.(?:{_SUFFIXES})",
        (r"[\"']{2,}", '"'),
        (r"\.{2,}", " "),
        (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
        (r"\s+\.\s+", " "),
    ]
)
_JOINT = re.compile(r"[-_]")
_MAX_JOINTS = 3
"""A text with more hyphens and underscores than this is treated as a slug; they become spaces."""
_NOISE = _compile(
    [
        # Numbers of articles: jc6640, jc6640vc, 6640vc231.
        r"\b[a-zA-Z]{1,3}\d{3,15}\b",
        r"\b[a-zA-Z]+\d+[a-zA-Z]+\b",
        r"\b\d+[a-zA-Z]+\d+\b",
        r"(?:worldwide\s+)?(?:free\s+)?shipping",
        r"(?:free\s)?download(?:\sfree)?",
        r"\bclick\b\s(?:for|on)\s\w+",
        rf"\b(?:{_SUFFIXES})(?:\simages?)?",
        r"\bpage\s+\d+\b",
        (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
        r"\b\d+\.?\d*[xх×]\d+\.?\d*\b",  # sizes; the second letter is Cyrillic
        (r"\b\s+:\s+", ": "),
        (r"(\D[,./])\b", r"\1 "),
        (r"\s+", " "),
        # One stray mark at either end.
        (r"^[\"']([\w\W]+)[\"']$", r"\1"),
        r"^['_,\-:;]",
        r"['_,\-:+]$",
        r"^\.\S+$",
    ]
)


def clean_caption(text: str) -> str:
    """Convert a prompt to lower case and apply the cleaning rules twice, as in training of published text models."""
    return _clean_once(_clean_once(text))


def _clean_once(text: str) -> str:
    text = urllib.parse.unquote_plus(text).strip().lower()
    text = _apply(_ADDRESSES, text)
    # From a stream, because BeautifulSoup warns that a short string without markup may be a file name.
    text = BeautifulSoup(io.StringIO(text), "html.parser").text
    text = _apply(_MARKS, text)
    if len(_JOINT.findall(text)) > _MAX_JOINTS:
        text = _JOINT.sub(" ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _apply(_NOISE, text).strip()


def _apply(rules: list[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text
