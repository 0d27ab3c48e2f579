"""Settings of every test: one torch thread, so that small models are not slowed by threads waiting for each other, and
examples of properties that are the same in every run."""

from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, database=None)
settings.load_profile("repeatable")
