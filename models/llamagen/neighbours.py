"""Compute and cache the nearest codes of each code of a VQ codebook, for LANTERN (arXiv 2410.03355, section 3.2).

A table (V, k) has the k nearest other codes of each code, nearest first; ties are ordered by code number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

logger = logging.getLogger(__name__)

Metric = Literal["l2", "cosine", "random"]

MAX_NEIGHBOURS = 1001
"""Largest k of a table: 1,000 as in the paper, and one more that the published code zeroes."""

_TABLE = "neighbours"
_FORMAT = 1
# Number of distances computed at once: 32 MiB of float64.
_DISTANCES_AT_ONCE = 1 << 22


class CodebookError(ValueError):
    """Raised for an invalid codebook, or if it has too few codes for the number of neighbours."""


@dataclass(frozen=True)
class Proximity:
    """Distance between codes: `metric` over the stored codes, or over codes of unit length if `normalised`.

    "cosine" always normalises. "random" is a control experiment: the neighbours of every code are drawn from all other
    codes with `seed`.
    """

    metric: Metric = "l2"
    normalised: bool = False
    seed: int = 0


def cache_folder() -> Path | None:
    """Return the cache folder of tables on this machine; None if the user has no home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftfleet" / "neighbours"
    except RuntimeError:
        return None


def neighbour_table(codebook: Tensor, num_neighbours: int, proximity: Proximity, folder: Path | None) -> Tensor:
    """Return the table (V, k) int64 of a codebook (V, code_dim) in its stored dtype, cached in `folder` or computed.

    `folder` None disables the cache. A damaged file or a read-only folder is logged as a warning.

    Raises:
        CodebookError: as `nearest_codes`.
    """
    _check(codebook, num_neighbours)
    if folder is None:
        return nearest_codes(codebook, num_neighbours, proximity)
    path = folder / f"{_key(codebook, num_neighbours, proximity)}.safetensors"
    try:
        if path.is_file():
            return _read(path, codebook.shape[0], num_neighbours)
    except (SafetensorError, OSError, ValueError) as error:
        logger.warning("%s is torn or cannot be read (%s): the table is made anew", path, error)
    table = nearest_codes(codebook, num_neighbours, proximity)
    try:
        _write(path, table)
    except OSError as error:
        logger.warning("the table of neighbours cannot be kept in %s: %s", folder, error)
    return table


def nearest_codes(codebook: Tensor, num_neighbours: int, proximity: Proximity) -> Tensor:
    """Compute the nearest other codes of each code, (V, k) int64 on the CPU, in blocks of bounded memory.

    Raises:
        CodebookError: `codebook` (V, code_dim) has values that are not finite, or fewer than k + 1 codes.
    """
    _check(codebook, num_neighbours)
    if proximity.metric == "random":
        return _drawn_codes(codebook.shape[0], num_neighbours, proximity.seed)
    codes = codebook.detach().to("cpu", torch.float64)
    if proximity.normalised or proximity.metric == "cosine":
        # ‖a − b‖² = 2 − 2 cos for directions: both rank alike, and equal codes stay equal to the last bit.
        codes = F.normalize(codes, dim=-1)
    numbers = torch.arange(len(codes))
    num_bits = (len(codes) - 1).bit_length()
    rows_at_once = max(1, _DISTANCES_AT_ONCE // len(codes))
    found = []
    for first in range(0, len(codes), rows_at_once):
        rows = numbers[first : first + rows_at_once]
        # Differences instead of a matrix multiplication, which rounds equal distances apart.
        distance = torch.cdist(codes[rows], codes, compute_mode="donot_use_mm_for_euclid_dist")
        distance[torch.arange(len(rows)), rows] = torch.inf
        # Non-negative numbers sort like their bits; the lowest ones are replaced by the code's number to rank ties.
        key = (distance.view(torch.int64) >> num_bits << num_bits) | numbers
        found.append(key.topk(num_neighbours, dim=-1, largest=False, sorted=True).values & ((1 << num_bits) - 1))
    return torch.cat(found)


def _drawn_codes(num_codes: int, num_neighbours: int, seed: int) -> Tensor:
    rows = np.empty((num_codes, num_neighbours), dtype=np.int64)
    for code in range(num_codes):
        others = np.random.default_rng((seed, code)).permutation(num_codes - 1)[:num_neighbours]
        rows[code] = others + (others >= code)  # numbered without the code itself
    return torch.from_numpy(rows)


def _check(codebook: Tensor, num_neighbours: int) -> None:
    if codebook.ndim != 2 or not codebook.is_floating_point() or not codebook.numel():
        raise CodebookError(f"a codebook is a table (codes, numbers), not {codebook.dtype} {list(codebook.shape)}")
    if not bool(codebook.isfinite().all()):
        raise CodebookError("the codebook holds numbers that are not finite")
    num_others = codebook.shape[0] - 1
    if not 1 <= num_neighbours <= min(num_others, MAX_NEIGHBOURS):
        raise CodebookError(
            f"{num_neighbours} neighbours are asked for; a codebook of {codebook.shape[0]} codes has 1 to "
            f"{num_others}, of which at most {MAX_NEIGHBOURS} are kept"
        )


# --- files ---------------------------------------------------------------------------------------------------------


def _key(codebook: Tensor, num_neighbours: int, proximity: Proximity) -> str:
    settings: dict[str, Any] = asdict(proximity) | {"k": num_neighbours, "format": _FORMAT, "of": list(codebook.shape)}
    stored = codebook.detach().to("cpu", torch.float32).contiguous().numpy()
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(stored.astype("<f4", copy=False).tobytes())
    return f"{codebook.shape[0]}x{num_neighbours}_{proximity.metric}_{digest.hexdigest()[:24]}"


def _digest(table: NDArray[Any]) -> str:
    return hashlib.sha256(table.tobytes()).hexdigest()


def _read(path: Path, num_codes: int, num_neighbours: int) -> Tensor:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        table: NDArray[Any] = file.get_tensor(_TABLE)
    if table.shape != (num_codes, num_neighbours) or metadata.get("digest") != _digest(table):
        raise ValueError("its content is not what was written")
    # Widened in numpy, because torch cannot gather with uint16.
    return torch.from_numpy(table.astype(np.int64))


def _write(path: Path, table: Tensor) -> None:
    """Write a table atomically; concurrent writers of one table write equal files."""
    compact = table.numpy().astype(np.uint16 if len(table) <= 1 << 16 else np.int32)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".part")
    os.close(handle)
    try:
        save_file({_TABLE: compact}, part, metadata={"digest": _digest(compact)})
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
