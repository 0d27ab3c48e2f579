"""C++ sources are built on first use, by one thread, and a failure is logged once."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

from models.backends.cpu.build import Library, beside

# Importing torch's own compiler warns of a part of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def test_sources_follow_one_another_and_are_built_at_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "one.h").write_text("static int added(int x) { return x + 5; }\n")
    (tmp_path / "two.cpp").write_text('extern "C" void add(int* x) { *x = added(*x); }\n')
    loops = Library((tmp_path / "one.h", tmp_path / "two.cpp"), {"add": [ctypes.c_void_p]}, "nothing is added")
    assert loops._built is None
    library = loops.library()
    assert library is not None
    number = ctypes.c_int(2)
    library.add(ctypes.byref(number))
    assert number.value == 7
    assert loops.library() is library


def test_a_failing_build_is_tried_and_logged_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    missing = Library((tmp_path / "not_there.cpp",), {}, "it goes on without")
    assert missing.library() is None
    assert missing.library() is None
    messages = [record.getMessage() for record in caplog.records if record.name == "models.backends.cpu.build"]
    assert len(messages) == 1
    assert messages[0].startswith("it goes on without: ")
    assert "not_there.cpp" in messages[0]


def test_a_second_thread_waits_for_the_running_build(monkeypatch: pytest.MonkeyPatch) -> None:
    built, may_end, begun = ctypes.CDLL(None), threading.Event(), threading.Event()
    loops = Library((), {}, "nothing")

    def build() -> ctypes.CDLL:
        if not begun.is_set():
            begun.set()
            assert may_end.wait(60)
        return built

    monkeypatch.setattr(loops, "_build", build)
    first = threading.Thread(target=loops.library)
    first.start()
    assert begun.wait(60)
    assert loops.library() is built
    may_end.set()
    first.join(60)
    assert loops.library() is built


def test_cpp_sources_are_part_of_the_package() -> None:
    assert all(path.exists() for path in beside("vectors.h", "attention.cpp", "gemm.cpp"))
