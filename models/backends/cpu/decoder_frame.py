"""Records the part of a decoder outside its layers, and replays it without the decoder's Python code.

Most decoders compute rotary embeddings before their layers and a norm after them, and spend host time on unused
options. If a recorded forward does only this, later forwards call rotary embedding, layers and norm directly. Decoders
that do more, such as scaling inputs or passing different masks to layers, run their own code.
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
class DecoderFrame:
    """The rotary embedding and the norm of a decoder, and the arguments of its layers.

    All layers get `constants` in all forwards, and position ids if `has_positions`. Positions of one axis are expanded
    to `num_axes` for the rotary embedding; 0 leaves them as they are.
    """

    rotary: nn.Module
    norm: nn.Module
    constants: dict[str, Any]
    has_positions: bool
    num_axes: int

    def before(self, embeds: Tensor, positions: Tensor) -> dict[str, Any]:
        """Return the layers' arguments besides states, for inputs (r, N, D) at positions (r, N) or (3, r, N)."""
        is_spread = self.num_axes and positions.dim() == 2
        expanded = positions.expand(self.num_axes, -1, -1) if is_spread else positions
        arguments = {**self.constants, _ANGLES: self.rotary(embeds, expanded)}
        return arguments | {_POSITIONS: positions} if self.has_positions else arguments

    def after(self, hidden: Tensor) -> Tensor:
        """Return the decoder's output (r, N, D) for the last layer's states."""
        out: Tensor = self.norm(hidden)
        return out


class FrameRecorder:
    """Records one forward of a decoder, as a context manager: layers call `record`, a hook records rotary inputs.

    Only the last layer's states are kept, so that long prompts need no more memory.
    """

    def __init__(self, decoder: nn.Module, num_layers: int) -> None:
        self._parts = [getattr(decoder, name, None) for name in ("rotary_emb", "norm")]
        self._num_layers, self._num_recorded = num_layers, 0
        self._differs = False
        self._arguments: dict[str, Any] = {}
        self._first: Tensor | None = None
        self._last: Any = None
        self._rotary_inputs: list[Tensor] = []
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> FrameRecorder:
        rotary = self._parts[0]
        if isinstance(rotary, nn.Module):
            self._hook = rotary.register_forward_pre_hook(self._record_rotary, with_kwargs=True)
        return self

    def _record_rotary(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._rotary_inputs += [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def record(self, hidden: Tensor, arguments: dict[str, Any], out: Any) -> None:
        """Record the next layer: its states `hidden` (r, N, D), its other arguments, and its output."""
        if self._num_recorded == 0:
            self._first, self._arguments = hidden, arguments
        elif hidden is not self._last or not _is_same(arguments, self._arguments):
            self._differs = True
        self._last = out
        self._num_recorded += 1

    def frame(self, embeds: Tensor, positions: Tensor, last: Tensor) -> DecoderFrame | None:
        """Return the frame that reproduces the forward from its inputs to `last` bitwise; None if there is none."""
        rotary, norm = self._parts
        if not isinstance(rotary, nn.Module) or not isinstance(norm, nn.Module) or self._differs:
            return None
        if self._num_recorded != self._num_layers or self._first is not embeds or len(self._rotary_inputs) != 1:
            return None
        first = self._arguments
        constants = {name: value for name, value in first.items() if name not in (_ANGLES, _POSITIONS)}
        has_positions = first.get(_POSITIONS) is not None
        if has_positions and not torch.equal(first[_POSITIONS], positions):
            return None
        if _POSITIONS in first and not has_positions:
            constants[_POSITIONS] = None
        if _ANGLES not in first or not all(isinstance(value, _CONSTANTS) for value in constants.values()):
            return None
        num_axes = self._rotary_inputs[0].shape[0] if self._rotary_inputs[0].dim() > positions.dim() else 0
        frame = DecoderFrame(rotary, norm, constants, has_positions, num_axes)
        recorded, computed = _parts(first[_ANGLES]), _parts(frame.before(embeds, positions)[_ANGLES])
        is_equal = len(recorded) == len(computed) and all(map(torch.equal, recorded, computed))
        return frame if is_equal and torch.equal(frame.after(self._last), last) else None


def _is_same(args: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the arguments of two layers are the same objects or equal constants."""
    return args.keys() == other.keys() and all(
        args[name] is other[name] or (isinstance(args[name], _CONSTANTS) and args[name] == other[name]) for name in args
    )


def _parts(angles: Any) -> tuple[Tensor, ...]:
    return angles if isinstance(angles, tuple) else (angles,)
