"""What a decoder does around its layers, learned from a forward of its own and then done without it.

Around their layers transformers' decoders do next to nothing, rotary angles before and a norm after, but take their
time over it, for all that they might have been asked to do. A decoder that was seen to do just this is spared the rest.
One that was seen to do more, such as scaling its inputs or giving its layers different masks,
is always run itself. Knows no graphs and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_ANGLES, _POSITIONS = "position_embeddings", "position_ids"
_CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Frame:
    """A decoder that computes rotary angles, runs its layers in turn, and normalises what the last returns.

    `constants` are given to all layers in all forwards; `has_positions` says whether positions are, too, and
    `num_axes` on how many axes angles are asked for where positions have one, 0 for positions as they are.
    """

    rotary: nn.Module
    norm: nn.Module
    constants: dict[str, Any]
    has_positions: bool
    num_axes: int

    def before(self, embeds: Tensor, positions: Tensor) -> dict[str, Any]:
        """What all layers are given besides states: of inputs (r, N, D) at positions (r, N) or (3, r, N)."""
        is_spread = self.num_axes and positions.dim() == 2
        asked = positions.expand(self.num_axes, -1, -1) if is_spread else positions
        given = {**self.constants, _ANGLES: self.rotary(embeds, asked)}
        return given | {_POSITIONS: positions} if self.has_positions else given

    def after(self, hidden: Tensor) -> Tensor:
        """The last layer's states → the decoder's (r, N, D)."""
        out: Tensor = self.norm(hidden)
        return out


class Watch:
    """Looks at one forward of a decoder with `num_layers`, between `with`: what its layers `note`, and its angles.

    States are not kept but for the last layer's, as a long prompt's would fill the memory.
    """

    def __init__(self, decoder: nn.Module, num_layers: int) -> None:
        self._parts = [getattr(decoder, name, None) for name in ("rotary_emb", "norm")]
        self._num_layers = num_layers
        self._num_noted = 0
        self._is_odd = False
        self._given: dict[str, Any] = {}
        self._first: Tensor | None = None
        self._last: Any = None
        self._asked: list[Tensor] = []
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Watch:
        rotary = self._parts[0]
        if isinstance(rotary, nn.Module):
            self._hook = rotary.register_forward_pre_hook(self._hear, with_kwargs=True)
        return self

    def _hear(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._asked += [one for one in (*given[1:], *named.values()) if isinstance(one, Tensor)]

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def note(self, hidden: Tensor, given: dict[str, Any], out: Any) -> None:
        """The next layer got states `hidden` (r, N, D), was `given` this besides, and returned `out`."""
        if self._num_noted == 0:
            self._first, self._given = hidden, given
        elif hidden is not self._last or not _is_same(given, self._given):
            self._is_odd = True
        self._last = out
        self._num_noted += 1

    def learn(self, embeds: Tensor, positions: Tensor, last: Tensor) -> Frame | None:
        """The frame that explains the forward, from inputs to states `last`; None if none does.

        Everything is compared bit for bit with what the decoder did.
        """
        rotary, norm = self._parts
        if not isinstance(rotary, nn.Module) or not isinstance(norm, nn.Module):
            return None
        if self._is_odd or self._num_noted != self._num_layers or self._first is not embeds or len(self._asked) != 1:
            return None
        first = self._given
        constants = {name: value for name, value in first.items() if name not in (_ANGLES, _POSITIONS)}
        has_positions = first.get(_POSITIONS) is not None
        if has_positions and not torch.equal(first[_POSITIONS], positions):
            return None
        if _POSITIONS in first and not has_positions:
            constants[_POSITIONS] = None
        if _ANGLES not in first or not all(isinstance(value, _CONSTANTS) for value in constants.values()):
            return None
        num_axes = self._asked[0].shape[0] if self._asked[0].dim() > positions.dim() else 0
        frame = Frame(rotary, norm, constants, has_positions, num_axes)
        seen, mine = _parts(first[_ANGLES]), _parts(frame.before(embeds, positions)[_ANGLES])
        is_it = len(seen) == len(mine) and all(torch.equal(one, two) for one, two in zip(seen, mine, strict=True))
        return frame if is_it and torch.equal(frame.after(self._last), last) else None


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two layers were given the very same."""
    return one.keys() == other.keys() and all(
        one[name] is other[name] or (isinstance(one[name], _CONSTANTS) and one[name] == other[name]) for name in one
    )


def _parts(angles: Any) -> tuple[Tensor, ...]:
    return angles if isinstance(angles, tuple) else (angles,)
