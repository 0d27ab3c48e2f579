"""Names the shards of a job: parts of one output that several drivers write independently."""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from configs.load import ConfigError

MAX_SHARDS = 4096
_SHARD = re.compile(r"(\d{1,4})/(\d{1,4})")


class Shard(NamedTuple):
    """Shard `number` (from 0) of `total`."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `I/N`; raise ConfigError unless 0 <= I < N <= `MAX_SHARDS`."""
        match = _SHARD.fullmatch(text)
        shard = cls(int(match[1]), int(match[2])) if match else None
        if shard is None or not shard.number < shard.total <= MAX_SHARDS:
            raise ConfigError(f"--shard {text}: must be I/N with 0 <= I < N <= {MAX_SHARDS}, such as 0/8")
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


WHOLE = Shard(0, 1)
"""The only shard of a job with one driver."""
