"""File names of a checkpoint from an index or a store: refused before use unless they are plain names."""

from __future__ import annotations

MAX_NAME_BYTES = 255
"""What file systems allow for one name."""


def is_plain_name(name: object) -> bool:
    """Whether a name is a plain file name and not a path."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
        and not any(character in "/\\" or ord(character) < 32 for character in name)
    )
