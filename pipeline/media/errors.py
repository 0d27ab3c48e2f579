"""Errors of media that cannot be decoded. Imports nothing, because the decoding process uses it."""

from __future__ import annotations


class MediaError(ValueError):
    """An image or video that cannot be decoded: one of the row's error codes, and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
