"""The whole prompt, images included, as the target sees it."""

from __future__ import annotations

from decoding.types import Request
from models.prefix import Prefix
from models.target import Target


class Full:
    """Everything the sample has."""

    def build(self, request: Request, model: Target) -> Prefix:
        return model.encode(request.prompt, request.images)
