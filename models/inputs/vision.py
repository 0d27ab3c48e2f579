"""Run a model's vision encoder for several prompts at once.

The calls of `get_image_features` or `get_video_features` that the forwards of several prompts make are joined along the
first axis of their tensors, and the features are split again. No code per model family is needed: on its first batch,
each method is compared with calls for single prompts, and a method that fails runs prompt by prompt.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

logger = logging.getLogger(__name__)

MAX_PATCHES = 1 << 14
"""Maximum patches of one forward of a vision encoder; a prompt with more runs alone. 28 images of LLaVA-1.5: the hidden
states of all its layers then have 0.8 GB in half precision."""
PATCH_PX = 14
"""Side of a patch in pixels if the configuration has none."""
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted |batched − alone| / |alone| (Frobenius) of one prompt's features, by dtype. GEMMs of other shapes
cause about 1e-6 in fp32; features of another image differ by about 1."""
READ = ("pooler_output", "deepstack_features")
"""Fields of an encoder's output that models read; other fields are dropped."""


class UnsplittableError(ValueError):
    """Raised if calls cannot be joined, or the features of a batch cannot be assigned to its prompts."""


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """A call of the model's method `method`, for the images or the videos of one prompt or of a batch."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def values(self) -> list[Any]:
        """All arguments; those with names follow in alphabetical order."""
        return [*self.args, *(self.kwargs[name] for name in sorted(self.kwargs))]

    @property
    def kind(self) -> Hashable:
        """Calls of one kind can be joined; raises UnsplittableError if this call cannot."""
        kinds = tuple(_kind(value, self._pads(value)) for value in self.values)
        return self.method, len(self.args), tuple(sorted(self.kwargs)), kinds

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(value.shape for value in self.values if isinstance(value, Tensor))

    def joined(self, others: Sequence[EncoderCall]) -> EncoderCall:
        """Return the call for the images of this call and then of `others`, which are of the same kind."""
        columns = list(zip(*(call.values for call in (self, *others)), strict=True))
        values = [_joined(column, self._pads(column[0])) for column in columns]
        names = sorted(self.kwargs)
        named = dict(zip(names, values[len(self.args) :], strict=True))
        return EncoderCall(self.method, tuple(values[: len(self.args)]), named)

    def _pads(self, value: Any) -> bool:
        """Whether the second axis holds the tiles of an image, which processors pad to the most tiles of a batch."""
        return self.method == "get_image_features" and isinstance(value, Tensor) and value.dim() == 5


class VisionEncoder:
    """The vision encoder of `model`; `name` is for log messages."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.owner = getattr(model, "model", model)
        self._name = name
        self._proven: set[tuple[str, bool]] = set()
        self._unbatched: set[str] = set()

    @torch.inference_mode()
    def run(self, calls: Sequence[EncoderCall]) -> list[Any]:
        """Return the features of each call, or the error that the model raises for it alone.

        Features of a batch are copied, so that those of one call do not keep the others in memory.
        Raises: torch.OutOfMemoryError if one call alone needs too much memory.
        """
        kinds: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            kinds.setdefault(self._kind(call), []).append(index)
        results: list[Any] = [None] * len(calls)
        for indices in kinds.values():
            for index, result in zip(indices, self._run_alike([calls[i] for i in indices]), strict=True):
                results[index] = result
        return results

    def runs_by_prompt(self, method: str, reason: str) -> None:
        """Run `method` prompt by prompt from now on."""
        if method not in self._unbatched:
            self._unbatched.add(method)
            logger.warning("%s: %s runs prompt by prompt: %s", self._name, method, reason)

    def _kind(self, call: EncoderCall) -> Hashable:
        try:
            return call.kind
        except UnsplittableError as error:
            self.runs_by_prompt(call.method, str(error))
            return call

    def _run_alike(self, calls: list[EncoderCall]) -> list[Any]:
        """Run calls of one kind in one forward; halve them if it runs out of memory or the model refuses them."""
        if len(calls) == 1:
            return [self._run_alone(calls[0])]
        if calls[0].method in self._unbatched:
            return [self._run_alone(call) for call in calls]
        try:
            return self._run_together(calls)
        except torch.OutOfMemoryError:
            reason = ""
        except torch.AcceleratorError:
            raise
        except UnsplittableError as error:
            self.runs_by_prompt(calls[0].method, str(error))
            return [self._run_alone(call) for call in calls]
        except Exception as error:  # methods of unknown families may raise any error on a batch
            reason = f"the model refuses a batch ({''.join(str(error).splitlines()[:1])})"
        half = len(calls) // 2
        results = self._run_alike(calls[:half]) + self._run_alike(calls[half:])
        if reason and len(calls) == 2 and not any(isinstance(result, Exception) for result in results):
            self.runs_by_prompt(calls[0].method, reason)
        return results

    def _run_alone(self, call: EncoderCall) -> Any:
        try:
            return reduced(self._call(call))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            # Without frames, which would keep tensors alive.
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)

    def _run_together(self, calls: list[EncoderCall]) -> list[Any]:
        _check_grids(calls)
        features = reduced(self._call(calls[0].joined(calls[1:])))
        sizes = {
            tuple(len(value) for value in column)
            for column in zip(*(call.values for call in calls), strict=True)
            if isinstance(column[0], Tensor)
        }
        parts = _split(features, sizes, len(calls))
        method, has_shapes = calls[0].method, len({call.shapes for call in calls}) > 1
        # A proof for prompts of several shapes is one for those of equal shapes too.
        if not self._proven & {(method, True), (method, has_shapes)}:
            if reason := self._difference(calls, parts):
                self.runs_by_prompt(method, reason)
                return [self._run_alone(call) for call in calls]
            self._proven.add((method, has_shapes))
        return parts

    def _difference(self, calls: list[EncoderCall], parts: list[Any]) -> str:
        """Return how features of a batch differ from those of its first and last prompt alone; "" if they do not."""
        for index in (0, -1):
            alone = _tensors(reduced(self._call(calls[index])))
            batched = _tensors(parts[index])
            if [tensor.shape for tensor in alone] != [tensor.shape for tensor in batched]:
                return "features of a batch have other shapes than those of one prompt"
            for mine, theirs in zip(batched, alone, strict=True):
                bound = BOUNDS.get(theirs.dtype, BOUNDS[torch.bfloat16])
                mine, theirs = mine.float().nan_to_num(), theirs.float().nan_to_num()
                difference = float((mine - theirs).norm()) / max(float(theirs.norm()), 1e-30)
                if difference > bound:
                    return f"features of a batch differ from those of one prompt by {difference:.1e}, bound {bound:.0e}"
        return ""

    def _call(self, call: EncoderCall) -> Any:
        return getattr(self.owner, call.method)(*call.args, **call.kwargs)


def num_patches(inputs: Mapping[str, Tensor], patch_px: int = PATCH_PX) -> int:
    """Return the number of patches in the images and videos of processor outputs."""
    count = 0
    for name, pixels in inputs.items():
        if name.startswith("pixel_values") and pixels.is_floating_point():
            if pixels.dim() <= 3:  # patches (N, D) or (images, N, D)
                count += math.prod(pixels.shape[:-1])
            else:
                height, width = pixels.shape[-2:]
                count += math.prod(pixels.shape[:-3]) * max(1, height // patch_px) * max(1, width // patch_px)
    return count


def patch_px(config: Any) -> int:
    """Return the side in pixels of a patch of the vision encoder."""
    size = getattr(getattr(config, "vision_config", None), "patch_size", None)
    return size if isinstance(size, int) and size > 0 else PATCH_PX


def reduced(features: Any) -> Any:
    """Reduce an encoder's output to the fields in `READ`."""
    if not isinstance(features, ModelOutput) or features.get("pooler_output") is None:
        return features
    return type(features)(**{name: features[name] for name in READ if features.get(name) is not None})


def _kind(value: Any, pads: bool) -> Hashable:
    """Return what must be equal in arguments that are joined."""
    if isinstance(value, Tensor) and value.dim():
        return value.dtype, value.dim(), value.shape[2 if pads else 1 :]
    if isinstance(value, (list, tuple)) and not any(isinstance(item, Tensor) for item in value):
        return tuple(_kind(item, False) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return type(value), value
    raise UnsplittableError(f"an argument of type {type(value).__name__} cannot be joined")


def _joined(column: Sequence[Any], pads: bool) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    if pads:
        most = max(tensor.shape[1] for tensor in column)
        column = [F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, most - tensor.shape[1])) for tensor in column]
    return torch.cat(list(column))


def _check_grids(calls: Sequence[EncoderCall]) -> None:
    """Raise ValueError if the patches of a call are not those of its grids (n, 3): the features of all later calls of
    the batch would be shifted."""
    grids = [_first(call, lambda value: not value.is_floating_point() and value.shape[1] == 3) for call in calls]
    patches = [_first(call, Tensor.is_floating_point) for call in calls]
    pairs = [
        (grid.prod(-1).sum(), len(rows)) for grid, rows in zip(grids, patches) if grid is not None and rows is not None
    ]
    if pairs and torch.stack([total for total, _ in pairs]).tolist() != [number for _, number in pairs]:
        raise ValueError("numbers of patches differ from those of the grids")


def _first(call: EncoderCall, fits: Any) -> Tensor | None:
    tensors = (value for value in call.values if isinstance(value, Tensor) and value.dim() == 2)
    return next((value for value in tensors if fits(value)), None)


def _split(features: Any, sizes: set[tuple[int, ...]], num_calls: int) -> list[Any]:
    """Split features of a batch into copies for each call. `sizes` are lengths of arguments of all calls: one of them
    sums to the length of the features, which have an entry for each image."""
    if isinstance(features, ModelOutput):
        parts = {name: _split(value, sizes, num_calls) for name, value in features.items()}
        return [type(features)(**{name: part[i] for name, part in parts.items()}) for i in range(num_calls)]
    if isinstance(features, (list, tuple)) and features and not isinstance(features[0], Tensor):
        layers = [_split(layer, sizes, num_calls) for layer in features]
        return [type(features)(layer[i] for layer in layers) for i in range(num_calls)]
    if not isinstance(features, (Tensor, list, tuple)) or (isinstance(features, Tensor) and not features.dim()):
        raise UnsplittableError(f"features of type {type(features).__name__} cannot be split")
    fits = [lengths for lengths in sizes if sum(lengths) == len(features)]
    if len(fits) != 1:
        raise UnsplittableError(f"{len(features)} features are not one for each image or video")
    ends = [sum(fits[0][: i + 1]) for i in range(num_calls)]
    return [_copied(features[end - length : end]) for end, length in zip(ends, fits[0], strict=True)]


def _copied(features: Any) -> Any:
    return features.clone() if isinstance(features, Tensor) else type(features)(map(_copied, features))


def _tensors(features: Any) -> list[Tensor]:
    """Return all tensors of nested features."""
    if isinstance(features, Tensor):
        return [features]
    inner = features.values() if isinstance(features, dict) else features if isinstance(features, (list, tuple)) else ()
    return [tensor for value in inner for tensor in _tensors(value)]
