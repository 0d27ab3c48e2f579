"""Read and check the files of EAGLE and Medusa heads: `config.json` and one weight file.

Reads safetensors, or torch's own format with `weights_only`, so that no code is run.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from files.local import open_regular, read_regular
from files.strict_json import JsonError, parse_json
from models.loading.checkpoints import CheckpointError, CheckpointRef
from models.loading.config_sizes import SizeRefused, check_sizes
from models.loading.hub import fetch
from models.loading.settings import SettingsRefused, checked_files
from models.loading.weight_headers import read_header

MAX_CONFIG_BYTES = 1 << 20
MAX_REPEATED_BYTES = 8 * 1024**3
"""Tensors of torch's own format may repeat one stored value; they may be larger than their file by this size."""


def head_folder(ref: CheckpointRef, weight_names: Sequence[str], weights: bool = True) -> Path:
    """Return the local folder of a head; downloads `config.json` and, with `weights`, the named files from the hub."""
    folder = ref.fetched(partial(fetch, names=("config.json", *(weight_names if weights else ()))))
    try:
        list(checked_files(folder))
    except SettingsRefused as error:
        raise CheckpointError(f"{ref.path}: {error}") from None
    return folder


def read_json(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a folder; returns an empty dict if there is none. Sizes are bounded."""
    file = folder / "config.json"
    try:
        data = parse_json(read_regular(file, MAX_CONFIG_BYTES))
        if not isinstance(data, dict):
            raise CheckpointError(f"{file}: it must hold a JSON object")
        check_sizes(data, None)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{file}: it cannot be read: {error.strerror or error}") from None
    except JsonError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except SizeRefused as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return data


def weight_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the path of the first of `names` that exists in the folder; raises CheckpointError if none does."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder}: it holds none of {', '.join(names)}")


def read_tensors(file: Path, wrappers: Sequence[str] = (), device: str = "cpu") -> dict[str, Tensor]:
    """Read all tensors of a weight file; torch's own format may nest them under a key in `wrappers`."""
    try:
        if file.suffix == ".safetensors":
            read_header(file)
            state: Any = load_file(file, device)
        else:
            _expect_stored(file)
            # Training scripts store their command line as a Namespace beside the weights; unpickling it runs no code.
            with torch.serialization.safe_globals([Namespace] if wrappers else []):
                state = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # truncated file, bad header, unknown dtype, forbidden pickle
        raise _unreadable(file, error) from error
    if isinstance(state, dict):
        state = next((state[name] for name in wrappers if isinstance(state.get(name), dict)), state)
    if not isinstance(state, dict) or not all(map(_is_plain, state.values())):
        raise CheckpointError(f"{file}: it must hold a plain state dict of tensors")
    num_bytes = sum(value.nbytes for value in state.values())
    if num_bytes > file.stat().st_size + MAX_REPEATED_BYTES:
        raise CheckpointError(f"{file}: its tensors have {num_bytes:,} bytes, as they repeat values of a small file")
    return {str(name): value for name, value in state.items()}


def read_shapes(file: Path, wrappers: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of a weight file's tensors without their values; `wrappers` as for `read_tensors`."""
    if file.suffix != ".safetensors":
        return shapes_of(read_tensors(file, wrappers, "meta"))
    try:
        return {name: tensor.shape for name, tensor in read_header(file).items()}
    except Exception as error:
        raise _unreadable(file, error) from error


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of named tensors."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def fingerprint(folder: Path, ref: CheckpointRef) -> str:
    """Return an identifier of a head's weights: the hub commit, or a hash over all config and weight files."""
    if not ref.is_folder:
        return folder.name
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in {".json", ".safetensors", ".bin", ".pt"}:
            with open_regular(file) as stream:
                digest.update(f"{file.name}:{file.stat().st_size}:".encode())
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    name: str = "model.safetensors",
) -> None:
    """Write `config.json` and the weight file `name`; `dtype` None keeps the dtype of each tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {key: value.detach().to("cpu", dtype or value.dtype).contiguous() for key, value in tensors.items()}
    if name.endswith(".safetensors"):
        save_file(stored, folder / name, metadata={"format": "pt"})
    else:
        torch.save(stored, folder / name)


def keep_as_safetensors(folder: Path) -> None:
    """Convert a head's pickled weight files to safetensors and delete the pickled files."""
    for file in (*folder.glob("*.bin"), *folder.glob("*.pt")):
        name = "model" if file.suffix == ".bin" else file.stem
        save_file(torch.load(file, weights_only=True), folder / f"{name}.safetensors")
        file.unlink()


def make_readable(folder: Path) -> None:
    """Give the files of a checkpoint the mode of its config.json: safetensors creates files that only their owner can
    read."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.iterdir():
        if file.is_file():
            file.chmod(mode)


def expect_shapes(where: str, shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless names and shapes of tensors (`shapes`) equal those `expected`."""
    wrong = [f"{name} is missing" for name in expected if name not in shapes]
    wrong += [f"{name} is not known" for name in shapes if name not in expected]
    wrong += [
        f"{name} has shape {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    if wrong:
        raise CheckpointError(f"{where}: {len(wrong)} tensor(s) do not fit, the first: {wrong[0]}")


def expect_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a floating-point tensor has a value that is NaN or infinite."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(f"{where}: {name} has values that are not finite; the file is damaged")


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _expect_stored(file: Path) -> None:
    """Raise OSError unless a file is regular, and ValueError if it is an archive whose members are compressed, which
    torch does not write: its size bounds the memory that its tensors take."""
    with open_regular(file) as stream:
        if not zipfile.is_zipfile(stream):
            return
        with zipfile.ZipFile(stream) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("its members are compressed")


def _unreadable(file: Path, error: BaseException) -> CheckpointError:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    line = line.partition(". In PyTorch")[0]  # the rest advises to load with weights_only=False
    return CheckpointError(f"{file}: it cannot be read (tensors only, no other pickled objects): {line}")
