"""Defines the error of media that cannot be decoded. Imports nothing, because the decoding process uses it."""

from __future__ import annotations


class MediaError(ValueError):
    """An image or video cannot be decoded: `code` is the row's error code, `message` the readable reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
