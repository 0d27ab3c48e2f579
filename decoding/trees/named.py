"""Static trees that papers name: their paths of child ranks. `decoding.trees.static` grows them."""

from __future__ import annotations

from collections.abc import Mapping

from decoding.trees.sage import SPECVLM_PATHS

Paths = tuple[tuple[int, ...], ...]

# Level by level: 5, 13, 16, 14 and 9 paths.
_NAIVE_EXTEND_57: Paths = (
    *((rank,) for rank in range(5)),
    *((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (4, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0), (0, 2, 1), (0, 2, 2)),
    *((0, 3, 0), (0, 3, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 3), (0, 0, 1, 0), (0, 0, 1, 1), (0, 0, 1, 2)),
    *((0, 0, 2, 0), (0, 0, 2, 1), (0, 0, 3, 0), (0, 1, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 2, 0, 0)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 0, 0, 0, 2), (0, 0, 0, 1, 0), (0, 0, 0, 1, 1)),
    *((0, 0, 1, 0, 0), (0, 0, 1, 0, 1), (0, 0, 1, 1, 0), (0, 0, 2, 0, 0)),
)

NAMED_PATHS: Mapping[str, Paths] = {
    # EAGLE's first tree, which SpecVLM and LANTERN++ run as well.
    "mc_sim_7b_63": SPECVLM_PATHS,
    # What LANTERN++ runs by default.
    "naive_extend_57": _NAIVE_EXTEND_57,
}
