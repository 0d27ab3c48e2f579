"""The caption cleaning of LlamaGen's text models: removes parts of web captions that do not describe the image.

The rules and their order are the published ones, with their oddities, because the models were trained with them. Two
rounds are the rule.
"""

from __future__ import annotations

import html
import io
import re
import urllib.parse

import ftfy
from bs4 import BeautifulSoup


def _compile(rules: list[str | tuple[str, str]]) -> list[tuple[re.Pattern[str], str]]:
    """Patterns with what takes their place; nothing, where a rule is only a pattern."""
    pairs = [(rule, "") if isinstance(rule, str) else rule for rule in rules]
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


_SUFFIXES = r"png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4"
_DOMAIN = r"[a-z0-9.\-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"

# What goes, and what takes its place, in this order; the text is in lower case by then.
_ADDRESSES = _compile(
    [
        (r"<person>", "person"),
        # Only the scheme goes here; what follows it is taken for a domain of its own.
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
"""A text with more hyphens and underscores than this is a slug, whose words they part."""
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
    """A prompt as the published text models were trained to read it: two rounds of the same rules, in lower case."""
    return _clean_once(_clean_once(text))


def _clean_once(text: str) -> str:
    text = urllib.parse.unquote_plus(text).strip().lower()
    text = _apply(_ADDRESSES, text)
    # From a stream, because a short string without markup would be suspected, with a warning, to be a file's name.
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
