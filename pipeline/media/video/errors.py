"""Errors of videos that cannot be decoded. Imports no decoder."""

from __future__ import annotations


class VideoError(ValueError):
    """A video that cannot be shown: one of the row's error codes, and a message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
