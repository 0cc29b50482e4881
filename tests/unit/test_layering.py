"""Imports point one way, and what must stay light stays light."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import llamarl

ROOT = Path(llamarl.__file__).parent
LAYERS: tuple[frozenset[str], ...] = (
    frozenset(
        {"types", "errors", "determinism", "strict", "running_time", "process_tree", "frames"}
        | {
            "bounded_server",
            "compiler",
            "linux_calls",
            "plural",
            "progress",
            "reading",
            "roles",
            "import_path",
            "other_names",
            "recipes",
            "config",
            "settings",
            "model_support",
            "tick_schedule",
            "tick_shares",
        }
    ),
    frozenset({"algorithms", "data", "transports"}),
    frozenset({"models", "environments", "observability", "checkpoint", "files"}),
    frozenset({"engine", "trainer", "weight_sync", "channels"}),
    frozenset({"executors"}),
    frozenset({"runtime", "controller"}),
    frozenset({"forecast", "report"}),
    frozenset({"api"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
MODULES = sorted(ROOT.rglob("*.py"))
NAMES = {".".join(("llamarl", *path.relative_to(ROOT).with_suffix("").parts)): path for path in MODULES}
TRAINING = [f"llamarl.executors.{role}" for role in ("trainer", "critic")]


def room_of(module: str) -> str | None:
    """``llamarl.engine.sampler`` -> ``engine``."""
    parts = module.split(".")
    return parts[1] if len(parts) >= 2 and parts[0] == "llamarl" else None


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules imported when ``path`` is imported or run, those under TYPE_CHECKING left out."""
    tree = tree_of(path)
    typing_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only.update(child for statement in node.body for child in ast.walk(statement))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return frozenset(found)


def test_imports_point_one_way() -> None:
    wrong = []
    for path in MODULES:
        relative = path.relative_to(ROOT).with_suffix("")
        here = room_of(".".join(("llamarl", *relative.parts)))
        if here is None or here == "__init__":
            continue
        for module in sorted(imports_of(path)):
            there = room_of(module)
            if there is not None and there in RANK and RANK[there] > RANK[here]:
                wrong.append(f"{relative} ({here}) imports {module}: that room lies further right")
    assert not wrong, "\n".join(wrong)


LIGHT = """
import sys

def light(what):
    assert not {"torch", "transformers", "s3fs", "gcsfs", "aiohttp"} & set(sys.modules), what

for module in (
    "llamarl", "llamarl.types", "llamarl.config", "llamarl.settings.trainer", "llamarl.models.folders", "llamarl.models.sizes",
    "llamarl.runtime.worker", "llamarl.runtime.local", "llamarl.forecast.search", "llamarl.cli.main",
    "llamarl.checkpoint.shared_folder", "llamarl.checkpoint.mirror", "llamarl.environments.registry",
    "llamarl.cli.train", "llamarl.controller.preflight", "llamarl.controller.begun", "llamarl.controller.prepare",
):
    __import__(module)
    light(module)
from llamarl.environments.registry import BUILT_IN, make_environment
for name in BUILT_IN:
    make_environment(name, {})
    light(name)
from llamarl.cli.main import main
assert main("plan --model SmolLM2-135M --hardware h100 --devices 2 --prompts 8 --group-size 4 --response-tokens 64".split()) == 0
light("plan")
"""


def test_what_needs_no_model_imports_no_torch_and_who_has_no_mirror_no_storage() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ray_is_imported_by_the_room_of_ray_alone_and_by_nobody_on_one_machine() -> None:
    rooms = ("runtime/hosts/ray.py", "cli/")
    imports = re.compile(r"^\s*(import ray\b|from ray[ .])", re.MULTILINE)
    found = {str(path.relative_to(ROOT)) for path in MODULES if imports.search(path.read_text())}
    assert [name for name in sorted(found) if not name.startswith(rooms)] == []
    loaded = loaded_with(*TRAINING, "llamarl.cli.train", "llamarl.controller.run", "llamarl.runtime.local")
    assert "torch" in loaded and "ray" not in {name.partition(".")[0] for name in loaded}


def test_executors_that_only_train_or_score_import_no_engine() -> None:
    ours = loaded_with(*TRAINING) & NAMES.keys()
    assert "llamarl.trainer.step" in ours
    assert {name for name in ours if name.startswith("llamarl.engine.")} <= {"llamarl.settings.engine"}


def loaded_with(*modules: str) -> set[str]:
    """What a process has imported with these modules: what they import outside of functions, and so on."""
    found: set[str] = set()
    todo = list(modules)
    while todo:
        if (name := todo.pop()) in found:
            continue
        found.add(name)
        for node in tree_of(NAMES[name]).body if name in NAMES else ():
            todo += imports_in(node)
    return found


def imports_in(node: ast.AST) -> set[str]:
    """Modules that one statement imports, of ours also those that it takes out of a package."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


def test_every_module_declares_what_it_exports() -> None:
    lacking = []
    for path in MODULES:
        if path.name in ("__init__.py", "__main__.py"):
            continue
        tree = tree_of(path)
        names = {
            t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        if not ast.get_docstring(tree):
            lacking.append(f"{path} has no docstring")
        if "__all__" not in names:
            lacking.append(f"{path} has no __all__")
    assert not lacking, "\n".join(lacking)


def test_every_module_of_ours_that_is_imported_exists() -> None:
    missing = []
    for path in MODULES:
        for module in sorted(imports_of(path)):
            place = ROOT.parent.joinpath(*module.split("."))
            there = place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()
            if module.split(".")[0] == "llamarl" and not there:
                missing.append(f"{path} imports {module}")
    assert not missing, "\n".join(missing)


def test_no_two_test_files_share_a_name() -> None:
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


UNPICKLES = {
    "environments/worker.py": "a worker reads the requests of the process that started it",
    "runtime/commands.py": "a rank reads its controller's orders over an authenticated link",
    "runtime/ranks.py": "the controller reads its ranks' replies over the same link",
}
"""Modules that may unpickle, and from whom: nothing of a disk, nothing that anyone else sends."""


def test_nothing_is_unpickled_but_by_three_named_modules() -> None:
    call = re.compile(r"pickle\.loads?\b|Unpickler\b|torch\.load\(|from pickle import|allow_pickle=True")
    found = {path.relative_to(ROOT).as_posix() for path in MODULES if call.search(path.read_text(encoding="utf-8"))}
    assert found == UNPICKLES.keys()


SETTINGS_IMPORT = {"errors", "strict"}


def test_settings_need_no_room() -> None:
    for path in ROOT.glob("settings/*.py"):
        own = {module.removeprefix("llamarl.") for module in imports_of(path) if module.startswith("llamarl.")}
        assert {name for name in own if not name.startswith("settings.")} <= SETTINGS_IMPORT, path


def needs_of_files() -> dict[str, set[str]]:
    """File -> files that it imports; inside functions and for types alone, too: a reader follows them all the same."""
    return {
        name: {module for node in ast.walk(tree_of(path)) for module in imports_in(node)} & NAMES.keys() - {name}
        for name, path in NAMES.items()
    }


def in_a_circle(left: dict[str, set[str]]) -> set[str]:
    """What is left when everything that needs nothing of the rest has been taken away, again and again."""
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    return set(left)


def test_a_circle_is_found() -> None:
    assert in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}


def test_no_files_import_each_other_in_a_circle() -> None:
    assert in_a_circle(needs_of_files()) == set()


def test_no_folders_import_each_other_in_a_circle() -> None:
    needs: dict[str, set[str]] = {}
    for name, modules in needs_of_files().items():
        here = room_of(name)
        if here is not None and here != "__init__":
            needs.setdefault(here, set()).update({room for room in map(room_of, modules) if room} - {here})
    assert in_a_circle(needs) == set()


MAX_LINES, MAX_COMPLEXITY = 80, 30
"""Of one function: about a screen, and as many ways through it as a reader can still hold in mind."""
_BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.With, ast.Assert, ast.comprehension)


def complexity_of(function: ast.AST) -> int:
    nodes = list(ast.walk(function))
    joined = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return 1 + joined + sum(isinstance(node, _BRANCHES) for node in nodes)


def test_a_function_ends_before_a_screen_does() -> None:
    functions = [
        (node.end_lineno - node.lineno + 1, complexity_of(node), f"{path.relative_to(ROOT)}:{node.name}")
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
    ]
    print("lines, complexity, function: the ten longest, the ten with most ways through them")
    for order in (lambda found: -found[0], lambda found: -found[1]):
        print(*sorted(functions, key=order)[:10], "", sep="\n")
    (loop,) = [found for found in functions if found[2].endswith("controller.py:run_graph")]
    assert loop[0] <= 80 and loop[1] <= 20
    assert [found for found in functions if found[0] > MAX_LINES or found[1] > MAX_COMPLEXITY] == []


# Sizes.


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_forecast_has_at_most_5000_lines_and_is_lighter_than_engine_and_trainer_with_its_verbs() -> None:
    verbs = [ROOT / "cli" / f"{name}.py" for name in ("plan", "simulate", "forecast_flags")]
    room = lines_of(*(ROOT / "forecast").rglob("*.py"))
    assert room <= 5_000
    assert room + lines_of(*verbs) < lines_of(*(ROOT / "engine").rglob("*.py"), *(ROOT / "trainer").rglob("*.py"))
