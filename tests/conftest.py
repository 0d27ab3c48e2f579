"""Settings of every test: one torch thread, so that small models are not slowed by threads waiting for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
