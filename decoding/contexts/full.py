"""The whole prompt, images included, as the target sees it."""

from __future__ import annotations

from decoding.contracts import Probe
from decoding.types import Request
from models.prefix import Prefix
from models.target import Target


class Full:
    """Everything the sample has."""

    needs_attention = False

    def build(self, request: Request, probe: Probe, model: Target) -> Prefix:
        return model.encode(request.prompt, request.images)
