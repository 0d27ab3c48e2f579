"""Make `.venv`: pick an interpreter and a torch build, install the dependencies. Standard library only; run by `make`.

On a CPU-only Linux machine `pip install torch` fetches gigabytes of CUDA. So TORCH_INDEX (an index URL) decides if it
is set. Otherwise, without an NVIDIA driver, the newest interpreter for which the configured indexes have the `+cpu`
build is used; then PyTorch's own index of CPU builds is tried; the default build comes last, with a notice.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / ".installed"
OLDEST, TOO_NEW = (3, 11), (3, 15)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    """Bring `.venv` up to date with `pyproject.toml`; 0 when it is, 1 with a reason when it cannot be."""
    index = os.environ.get("TORCH_INDEX", "").strip()
    try:
        choice = choose_torch(index)
        install([*choice, "-e", f"{ROOT}[dev]"])
    except Refused as error:
        print(f"make: {error}", file=sys.stderr)
        return 1
    STAMP.write_text(" ".join(choice) + "\n")
    return 0


class Refused(Exception):
    """Why the environment cannot be made, and what to do."""


def choose_torch(index: str) -> list[str]:
    """Make the virtual environment and return pip's arguments for torch; empty when pyproject's own pin is right."""
    pin, candidates = torch_pin(), interpreters()
    if index or not cpu_only_linux():
        make_venv(candidates[0])
        return [pin, "--extra-index-url", index] if index else []
    for interpreter in candidates:
        make_venv(interpreter)
        if resolves(f"{pin}+cpu"):
            return [f"{pin}+cpu"]
    make_venv(candidates[0])
    if resolves(f"{pin}+cpu", "--index-url", CPU_INDEX):
        return [f"{pin}+cpu", "--extra-index-url", CPU_INDEX]
    print("make: no CPU build of torch found; installing the default build (set TORCH_INDEX to choose another)")
    return []


def interpreters() -> list[str]:
    """Fitting interpreters, newest first, or the one that PYTHON names: each is run once, because a name on the PATH
    may be an empty shim. Raises Refused if there is none."""
    named = os.environ.get("PYTHON", "").strip()
    names = [f"python3.{minor}" for minor in range(TOO_NEW[1] - 1, OLDEST[1] - 1, -1)]
    found: dict[tuple[int, ...], str] = {}
    for name in [named] if named else [*names, sys.executable, "python3", "python"]:
        path = shutil.which(name) if name else None
        version = version_of(path) if path else None
        if path and version and OLDEST <= version < TOO_NEW:
            found.setdefault(version, path)
    if named and not found:
        raise Refused(
            f"PYTHON={named} is not a Python from {'.'.join(map(str, OLDEST))} to below {'.'.join(map(str, TOO_NEW))}."
        )
    if not found:
        raise Refused(
            f"needs Python {'.'.join(map(str, OLDEST))} or newer, below {'.'.join(map(str, TOO_NEW))}, and found none "
            f"(this one is {platform.python_version()}). Install one and run make again."
        )
    return [found[version] for version in sorted(found, reverse=True)]


def version_of(interpreter: str) -> tuple[int, ...] | None:
    """(major, minor) as the interpreter itself says, or None when it does not run."""
    done = run([interpreter, "-c", "import sys; print(*sys.version_info[:2])"])
    match = re.fullmatch(r"(\d+) (\d+)", done.stdout.strip()) if done.returncode == 0 else None
    return (int(match[1]), int(match[2])) if match else None


def make_venv(interpreter: str) -> None:
    """Create `.venv` with this interpreter; one of the same version is kept. Raises Refused if the venv or ensurepip
    module is missing, with the package that has it."""
    version = version_of(interpreter)
    pip_works = run([str(venv_python()), "-m", "pip", "--version"]).returncode == 0
    if pip_works and version_of(str(venv_python())) == version:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    done = run([interpreter, "-m", "venv", str(VENV)])
    if done.returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        name = f"python{'.'.join(map(str, version or ()))}-venv"
        raise Refused(
            f"{interpreter} cannot make a virtual environment; on Debian and Ubuntu `apt install {name}` brings the "
            f"missing venv module. It said:\n{(done.stdout + done.stderr).strip()}"
        )


def venv_python() -> Path:
    """The interpreter inside `.venv`."""
    return VENV / "bin" / "python"


def torch_pin() -> str:
    """The pinned requirement in `pyproject.toml`, such as `torch==2.13.0`."""
    match = re.search(r'"(torch==[0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert match, "pyproject.toml pins no torch"
    return match[1]


def cpu_only_linux() -> bool:
    """Whether the default build would bring CUDA libraries that nothing here can use."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and not Path("/proc/driver/nvidia").exists()


def resolves(requirement: str, *arguments: str) -> bool:
    """Whether pip finds a wheel of this requirement for `.venv`, without installing it."""
    command = [str(venv_python()), "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    limits = ["--only-binary", ":all:", "--retries", "1", "--timeout", "30"]
    return run([*command, *limits, *arguments, requirement]).returncode == 0


def install(arguments: list[str]) -> None:
    """Install into `.venv`, showing pip's own lines only when it fails. Raises Refused if pip failed."""
    print(f"make: installing into {VENV.name} (a few minutes the first time)", flush=True)
    done = run([str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check", *arguments])
    if done.returncode:
        raise Refused(f"pip could not install the dependencies:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end and capture; a program that cannot be started counts as failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


if __name__ == "__main__":
    sys.exit(main())
