"""Tests the package layers: imports point one way, folders are small, and only backends depend on the device.

Importing initialises nothing and needs no Ray below the actors.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("jobs", "pipeline", "actors", "decoding", "models")
FREE = ("zoo", "benchmarks", "docgen", "tests")
READS_CONFIGS = ("jobs", "pipeline", "actors")
BASE = "files"
"""The package that all layers and configs may import; it imports none of them."""
MAX_MODULES = 15
FORMATS_AND_METHODS = (
    "pipeline/formats",
    "decoding/drafters",
    "decoding/acceptance",
    "decoding/contexts",
    "decoding/trees",
)
"""Rooms of one module per format or method, which may have more modules."""
DEVICE_WORDS = re.compile(
    r"device\.type|\.is_cuda|torch\.cuda|torch\.compile|torch\._dynamo|torch\._inductor|torch\.backends"
)
NEVER_BELOW_ACTORS = ("ray", "pyarrow", "fsspec", "pandas", "duckdb")


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere in it, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: relative import; write the whole path"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def tops_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_layers_to_its_right(layer: str) -> None:
    assert modules_of(layer), f"no module found in {layer}"
    forbidden = {*LAYERS[: LAYERS.index(layer)], *FREE}
    if layer not in READS_CONFIGS:
        forbidden.add("configs")
    wrong = {str(path.relative_to(ROOT)): sorted(tops_of(path) & forbidden) for path in modules_of(layer)}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_configs_import_no_layer() -> None:
    wrong = {path.name: sorted(tops_of(path) & {*LAYERS, *FREE}) for path in modules_of("configs")}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_the_base_imports_no_other_package() -> None:
    wrong = {path.name: sorted(tops_of(path) & {*LAYERS, *FREE, "configs"}) for path in modules_of(BASE)}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("layer", ["decoding", "models", BASE])
def test_layers_below_the_actors_import_neither_ray_nor_row_files(layer: str) -> None:
    wrong = {str(path.relative_to(ROOT)): sorted(tops_of(path) & {*NEVER_BELOW_ACTORS}) for path in modules_of(layer)}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_the_check_sees_an_import_that_points_the_wrong_way(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    from pipeline.rows.schemas import RowError\n    import ray.data\n")
    assert tops_of(planted) == {"pipeline", "ray"}
    assert imports_of(planted) == {"pipeline.rows.schemas.RowError", "ray.data"}


def dotted_names(*packages: str) -> list[str]:
    """Importable module names; `__main__` runs something and is left out."""
    names = []
    for package in packages:
        for path in modules_of(package):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "__main__":
                names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def run_python(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_models_and_decoding_import_where_ray_is_not_installed() -> None:
    run_python(f"""
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("ray", "pyarrow"):
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
for name in {dotted_names("models", "decoding", BASE)!r}:
    importlib.import_module(name)
assert "ray" not in sys.modules and "pyarrow" not in sys.modules
""")


def test_importing_everything_initialises_no_device_and_starts_no_ray() -> None:
    run_python(f"""
import importlib
for name in {dotted_names("configs", *LAYERS)!r}:
    importlib.import_module(name)
import ray, torch
assert not torch.cuda.is_initialized()
assert not ray.is_initialized()
""")


def test_the_driver_side_of_the_actor_needs_no_torch() -> None:
    run_python("""
import sys
import actors.generate, pipeline.run.graph
assert "torch" not in sys.modules
""")


# --- rooms ---------------------------------------------------------------------------------------------------------


def rooms() -> dict[str, Path]:
    """Dotted name → file of every module of the layers, configs and benchmarks."""
    cycles = {}
    for package in (*LAYERS, BASE, "configs", "benchmarks"):
        for path in modules_of(package):
            cycles[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return cycles


def room_edges(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Folder → folders that its modules import from, lazy and type-only imports included; nested folders are one."""
    edges: dict[str, set[str]] = {}
    for path in modules.values():
        for name in imports_of(path):
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            if target is None:
                continue
            own, other = (module.parent.relative_to(ROOT).as_posix() for module in (path, target))
            if own != other and not f"{own}/".startswith(f"{other}/") and not f"{other}/".startswith(f"{own}/"):
                edges.setdefault(own, set()).add(other)
    return edges


def cycle_of(edges: dict[str, set[str]]) -> list[str]:
    """The nodes that are left when nodes without outgoing edges are removed repeatedly; empty if there is no cycle."""
    left = {node: set(targets) for node, targets in edges.items()}
    while done := [node for node, targets in left.items() if not targets & left.keys()]:
        for node in done:
            del left[node]
    return sorted(left)


def test_rooms_import_without_cycles() -> None:
    assert cycle_of(room_edges(rooms())) == []


def test_the_check_finds_a_cycle() -> None:
    assert cycle_of({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "e": {"a"}}) == ["a", "b", "c", "e"]
    assert cycle_of({"a": {"b", "c"}, "b": {"c"}}) == []


def module_edges(modules: dict[str, Path]) -> dict[str, set[str]]:
    """Module → modules that it imports, lazy and type-only imports included."""
    edges: dict[str, set[str]] = {}
    for module, path in modules.items():
        imported = {name if name in modules else name.rpartition(".")[0] for name in imports_of(path)}
        edges[module] = (imported & modules.keys()) - {module}
    return edges


def nodes_of_cycles(edges: dict[str, set[str]]) -> list[str]:
    """The nodes that are reachable from themselves."""

    def reachable(node: str) -> set[str]:
        cycle_members: set[str] = set()
        left = [node]
        while left:
            new = edges.get(left.pop(), set()) - cycle_members
            cycle_members |= new
            left += new
        return cycle_members

    return [node for node in cycle_of(edges) if node in reachable(node)]


def test_modules_import_without_cycles() -> None:
    assert nodes_of_cycles(module_edges(rooms())) == []


def test_the_check_finds_a_cycle_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    sources = {"a.one": "def f():\n    from a.two import g\n", "a.two": "import a.one\n", "a.three": "import a.one\n"}
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    modules = {name: tmp_path / f"{name}.py" for name in sources}
    assert nodes_of_cycles(module_edges(modules)) == ["a.one", "a.two"]


def private_members(path: Path) -> tuple[set[str], set[str]]:
    """Private names that a module defines, and those that it uses of other objects than `self` and `cls`."""
    defined: set[str] = set()
    used: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (defined if is_own else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
    private = re.compile(r"_(?!_|replace$|make$|asdict$|fields$|modules$)")  # documented
    return {name for name in defined if private.match(name)}, {name for name in used if private.match(name)}


def foreign_members(modules: dict[str, Path]) -> dict[str, list[str]]:
    """Module → private names that it uses and that only other modules of the project define."""
    private = {name: private_members(path) for name, path in modules.items()}
    everywhere = set().union(*(defined for defined, _ in private.values()))
    foreign = {name: sorted((used & everywhere) - defined) for name, (defined, used) in private.items()}
    return {name: names for name, names in foreign.items() if names}


def test_no_module_uses_private_members_of_another() -> None:
    assert foreign_members({name: path for name, path in rooms().items() if not name.startswith("benchmarks")}) == {}


def test_the_check_finds_a_private_member_of_another_module(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Queue:\n    def __init__(self):\n        self._waiting = []\n")
    (tmp_path / "b.py").write_text("def f(queue):\n    return queue._waiting, queue._replace(x=1)\n")
    assert foreign_members({name: tmp_path / f"{name}.py" for name in ("a", "b")}) == {"b": ["_waiting"]}


QUEUE = re.compile(r"\b(deque|\w*Queue)\[.*\bRequest\b")


def request_queues(path: Path) -> list[str]:
    """Attributes of classes in a file that are queues of requests."""
    queue_names = []
    for kind in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
        annotated = [node for node in ast.walk(kind) if isinstance(node, ast.AnnAssign)]
        attributes = [node for node in annotated if isinstance(node.target, ast.Attribute) or node in kind.body]
        queues = [node for node in attributes if QUEUE.search(ast.unparse(node.annotation))]
        queue_names += [f"{kind.name}.{ast.unparse(queue.target)}" for queue in queues]
    return queue_names


def test_requests_wait_in_one_kind_of_queue() -> None:
    result = {path.relative_to(ROOT).as_posix(): request_queues(path) for path in rooms().values()}
    assert {path: names for path, names in result.items() if names} == {
        "decoding/scheduling/queue.py": ["RequestQueue.self._groups"]
    }


def test_the_check_finds_a_second_queue(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "class Retries:\n    waiting: SimpleQueue[Request]\n\n"
        "    def __init__(self):\n        self._again: deque[Request] = deque()\n"
        "        local: deque[Request] = deque()\n"
    )
    assert request_queues(planted) == ["Retries.waiting", "Retries.self._again"]


def test_rooms_are_small() -> None:
    counts: dict[str, int] = {}
    for path in rooms().values():
        room = path.parent.relative_to(ROOT).as_posix()
        counts[room] = counts.get(room, 0) + (path.name != "__init__.py")
    assert {room: n for room, n in counts.items() if n > MAX_MODULES and room not in FORMATS_AND_METHODS} == {}


def test_only_backends_depend_on_the_device() -> None:
    result = {
        path.relative_to(ROOT).as_posix(): sorted(set(DEVICE_WORDS.findall(path.read_text())))
        for layer in ("decoding", "models", "actors")
        for path in modules_of(layer)
        if not path.relative_to(ROOT).as_posix().startswith("models/backends/")
    }
    assert {path: words for path, words in result.items() if words} == {}
