"""Checks the texts of a caption job: which of them are empty, too short, looped, or in another script, and which a
user's function refuses. It does not know why a text is as it is, and changes none.
"""

from __future__ import annotations

from collections.abc import Callable

import regex

from actors.losses import MetricError
from configs.load import ConfigError
from configs.output import ChecksConfig
from decoding.types import Completion
from files.external_code import ExternalCodeError, load

EMPTY, TOO_SHORT, LOOPED, WRONG_SCRIPT, PYTHON = "empty", "too_short", "looped", "wrong_script", "python"
CODES = (EMPTY, TOO_SHORT, LOOPED, WRONG_SCRIPT, PYTHON)
"""Codes of failed checks, in the order of the column. They are part of the output format: codes may be added and are
never renamed."""
FUNCTION = "checks.python"
"""Dotted path of the user's function."""

Check = Callable[[Completion], bool]
"""Returns whether a text fails."""


class CheckError(MetricError):
    """Raised if a user's check raises, or returns no truth value."""


class Checks:
    """The checks of a job; ConfigError if a script or a function is unknown."""

    def __init__(self, config: ChecksConfig) -> None:
        self._config = config
        self._function = None if config.python is None else _imported(config.python)
        self._own_script = self._asked_scripts = None
        if config.scripts:
            self._own_script = regex.compile(r"[^\p{Script=Common}\p{Script=Inherited}\p{Script=Unknown}]")
            self._asked_scripts = regex.compile("[" + "".join(map(_script, config.scripts)) + "]")

    def failed(self, completion: Completion) -> tuple[str, ...]:
        """Return the codes of the checks that a text fails, in the order of `CODES`; none for a row with an error."""
        if completion.error is not None:
            return ()
        config, text = self._config, completion.text.strip()
        is_short = len(text) < config.min_characters or (config.min_words > 0 and len(text.split()) < config.min_words)
        failed = {
            EMPTY: config.empty and not text,
            TOO_SHORT: is_short,
            LOOPED: config.looped and completion.finish_reason == "looped",
            WRONG_SCRIPT: self._is_in_another_script(text),
            PYTHON: self._function is not None and not self._function(completion.text),
        }
        return tuple(code for code in CODES if failed[code])

    def _is_in_another_script(self, text: str) -> bool:
        if self._own_script is None or self._asked_scripts is None:
            return False
        num_letters = len(self._own_script.findall(text))
        num_asked = len(self._asked_scripts.findall(text))
        return num_letters > 0 and num_asked < self._config.min_script_share * num_letters


def _script(name: str) -> str:
    pattern = rf"\p{{Script={name}}}"
    try:
        regex.compile(pattern)
    except regex.error:
        raise ConfigError(
            f"checks.scripts: {name!r} is no script of Unicode; names are such as Latin, Cyrillic, Arabic, Han, "
            "Hiragana or Hangul"
        ) from None
    return pattern


def _imported(name: str) -> Callable[[str], bool]:
    try:
        function = load(name)
    except ExternalCodeError as error:
        raise ConfigError(f"{FUNCTION}: {name}: {error}") from None
    if not callable(function):
        raise ConfigError(f"{FUNCTION}: {name} is no function but {type(function).__name__}")

    def check(text: str) -> bool:
        try:
            passes = function(text)
        except Exception as error:  # a user's function raises any error
            raise CheckError(f"the check {name} raised {type(error).__name__}: {error}") from None
        if not isinstance(passes, bool):
            raise CheckError(f"the check {name} returned {passes!r}, and a check returns True or False")
        return passes

    return check
