"""Load draft heads: apply the row of a kind of head (`HeadFormat`, listed in `models.heads.formats`) to its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from models.heads import files
from models.heads.config import HeadConfig
from models.loading.checkpoints import DTYPES, CheckpointError, CheckpointRef

WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
OFFSETS = "d2t"
"""Name of the tensor with the offset from each draft id to its target id; `t2d` is redundant and not read."""
EMBEDDING = "embed_tokens.weight"
TABLES = ("rotary_emb.inv_freq",)
"""Redundant buffers of old files; they are computed from the configuration."""
Shapes = Mapping[str, tuple[int, ...]]
Shape = TypeVar("Shape")
Network = TypeVar("Network", bound=nn.Module)
Value = TypeVar("Value")


@dataclass(frozen=True)
class HeadFormat(Generic[Shape, Network]):
    """One kind of head in its published layouts.

    `read` makes the shape from the configuration, for a target with a number of layers; `fit` completes it with the
    tensors' shapes, of the checkpoint with a path. `network` is called on the meta device too. `needs` begins the
    refusal of a folder without `config.json`; None accepts it.
    """

    needs: str | None
    read: Callable[[HeadConfig, int], Any]
    network: Callable[..., Network]
    fit: Callable[[Any, Shapes, str], Shape] = lambda shape, shapes, path: shape
    names: tuple[str, ...] = WEIGHT_NAMES
    downloaded: tuple[str, ...] = WEIGHT_NAMES
    prefix: str = ""
    """Prefix of tensor names in files of a whole model, whose other tensors are not read."""
    renamed: tuple[str, str] = ("", "")
    """The first letters of published tensor names, and those of the network."""
    ignored: tuple[str, ...] = TABLES
    """Last letters of tensor names that are not read."""
    arrange: Callable[[Shape, dict[str, Tensor]], dict[str, Tensor]] = lambda shape, tensors: tensors
    """Converts a file's tensors to the network's, for model families whose files order weights differently."""
    borrows: Callable[[Shape], bool] = lambda shape: False
    """Whether a file may lack the token embedding; the head then uses the target's."""
    checks_values: bool = True
    """Whether reading a shape also refuses weights with values that are not finite."""
    first: str = "fc.weight"
    """The tensor whose type is that of the head."""

    def named(self, tensors: Mapping[str, Value]) -> dict[str, Value]:
        """Select the tensors of the head under the names of its network."""
        inside = {
            name.removeprefix(self.prefix): value for name, value in tensors.items() if name.startswith(self.prefix)
        }
        selected = {name.replace(*self.renamed, 1): value for name, value in (inside or tensors).items()}
        return {name: value for name, value in selected.items() if not name.endswith(self.ignored)}


def read_shape(kind: HeadFormat[Shape, Any], ref: CheckpointRef, num_target_layers: int = 0) -> Shape:
    """Read the shape of a checkpoint; for a local folder it is compared with names and shapes of the weights.

    A format whose shape is in the tensors returns None for a hub id. Raises CheckpointError.
    """
    folder = files.head_folder(ref, kind.downloaded, weights=False)
    shape = kind.read(_config(kind, ref, folder), num_target_layers)
    if not ref.is_folder:
        return shape  # type: ignore[no-any-return]
    file = files.weight_file(folder, kind.names)
    if not kind.checks_values:
        return _fitted(kind, ref, shape, kind.named(files.read_shapes(file)), {})
    tensors = kind.named(files.read_tensors(file))
    return _fitted(kind, ref, shape, files.shapes_of(tensors), tensors)


def load_head(
    kind: HeadFormat[Any, Network],
    ref: CheckpointRef,
    dtype: str,
    device: torch.device,
    num_target_layers: int = 0,
    embedding: Tensor | None = None,
) -> Network:
    """Load a head in evaluation mode; `dtype` is a key of `DTYPES`, or "auto" for the stored type.

    `embedding` (V, D) is the target's input embedding, for a file without an own one. Raises CheckpointError.
    """
    folder = files.head_folder(ref, kind.downloaded)
    shape = kind.read(_config(kind, ref, folder), num_target_layers)
    tensors = kind.named(files.read_tensors(files.weight_file(folder, kind.names)))
    shape = _fitted(kind, ref, shape, files.shapes_of(tensors), tensors if kind.checks_values else {})
    network = kind.network(shape)
    if hasattr(network, "token_ids"):
        network.token_ids = draft_token_ids(ref.path, tensors, shape.draft_vocab_size, shape.vocab_size)
    weights = {name: value for name, value in tensors.items() if name != OFFSETS}
    if EMBEDDING not in weights and kind.borrows(shape):
        weights[EMBEDDING] = _borrowed(ref, embedding, shape.vocab_size, shape.layers.hidden_size)
    network.load_state_dict(kind.arrange(shape, weights), strict=True)
    network.to(device=device, dtype=DTYPES.get(dtype, tensors[kind.first].dtype))
    return network.requires_grad_(False).eval()


def read_verifier(ref: CheckpointRef) -> tuple[str, ...]:
    """Return the architectures of the target that a head was trained for; empty if its file does not name them."""
    config = HeadConfig(files.read_json(files.head_folder(ref, (), weights=False)), ref.path)
    architectures = config.part("speculators_config").part("verifier").get("architectures")
    return tuple(str(name) for name in architectures or ())


def draft_token_ids(where: str, tensors: Mapping[str, Tensor], draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Return the target's ids of the draft vocabulary, (V_d,), from the tensor `OFFSETS` if there is one.

    Raises CheckpointError for ids that the target lacks or that occur twice.
    """
    numbers = torch.arange(draft_vocab_size)
    if OFFSETS not in tensors:
        return numbers
    offsets = tensors[OFFSETS]
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise CheckpointError(f"{where}: {OFFSETS} must hold whole numbers, not {offsets.dtype}")
    ids = numbers + offsets.long()
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise CheckpointError(
            f"{where}: {OFFSETS} names token {int(outside[0])}, and the vocabulary has {vocab_size} tokens"
        )
    if len(set(ids.tolist())) < len(ids):
        raise CheckpointError(f"{where}: {OFFSETS} maps two draft tokens to one token of the target")
    return ids


def _config(kind: HeadFormat[Any, Any], ref: CheckpointRef, folder: Path) -> HeadConfig:
    config = files.read_json(folder) if kind.needs else {}
    if kind.needs and not config:
        raise CheckpointError(f"{folder}: {kind.needs} config.json")
    return HeadConfig(config, ref.path)


def _fitted(
    kind: HeadFormat[Shape, Any], ref: CheckpointRef, given: Any, shapes: Shapes, tensors: Mapping[str, Tensor]
) -> Shape:
    """Return the complete shape. Raises CheckpointError unless the file's tensors have the names and `shapes` of the
    network, and `tensors` finite values."""
    shape: Any = kind.fit(given, shapes, ref.path)
    with torch.device("meta"):
        network = kind.network(shape)
    expected = files.shapes_of(network.state_dict())
    has_vocabulary = hasattr(network, "token_ids")
    if has_vocabulary and (shape.draft_vocab_size < shape.vocab_size or OFFSETS in shapes):
        expected[OFFSETS] = (shape.draft_vocab_size,)
    if EMBEDDING not in shapes and kind.borrows(shape):
        del expected[EMBEDDING]
    files.expect_shapes(ref.path, shapes, expected)
    files.expect_finite(ref.path, tensors)
    if has_vocabulary:
        draft_token_ids(ref.path, tensors, shape.draft_vocab_size, shape.vocab_size)
    return shape  # type: ignore[no-any-return]


def _borrowed(ref: CheckpointRef, embedding: Tensor | None, vocab_size: int, width: int) -> Tensor:
    assert embedding is not None, "the caller passes the target's embedding"
    if embedding.shape[1] != width or embedding.shape[0] < vocab_size:
        raise CheckpointError(
            f"{ref.path}: it has no {EMBEDDING}, and the target's embedding of shape {list(embedding.shape)} does "
            f"not fit {vocab_size} tokens of width {width}"
        )
    return embedding[:vocab_size]
