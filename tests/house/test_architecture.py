"""The law of the source tree, held by reading it: who may import whom, and what no file may do.

`check_package` returns a sentence for each violation; nothing is imported or run. The last section
plants one violation of each kind and expects that sentence, so a checker that sees nothing fails.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "nanoengine"

# What everybody may import, and what each of these imports in turn.
BASE = {
    "errors": set(),
    "config": {"errors", "text"},
    "sampling_params": {"errors", "text"},
    "sequence": {"errors", "sampling_params", "outputs"},
    "context": set(),
    "outputs": {"errors"},
}
# What else the files of a folder may import: other folders. Maths (models, kernels, attention) and
# memory (kv) meet in context.py alone.
FOLDERS = {
    "devices": set(),
    "kv": {"devices"},
    "models": set(),
    "kernels": {"models", "devices"},
    "attention": {"kernels", "devices"},
    "text": set(),
    "loading": {"models", "text", "devices"},
    "startup": {"loading", "attention", "kernels", "models", "kv", "text", "devices"},
    "workers": {"startup", "loading", "attention", "kernels", "models", "kv", "text", "devices"},
    "engine": {"workers", "startup", "loading", "models", "kernels", "kv", "text", "devices"},
    "bench": {"__init__", "api", "loading", "text"},
    "serving": {"__init__", "api", "engine", "workers", "text", "devices"},
    "cli": {"__init__", "bench", "loading", "serving", "startup", "text", "devices"},
}
# What users call. The package itself shows what users import.
FRONT = {
    "api": {"engine", "kv", "text", "devices"},
    "ray": {"api"},
    "__init__": {"api", "devices"},
    "__main__": {"cli"},
}
LAW = {
    **BASE,
    **{name: set(BASE) | targets for name, targets in (FOLDERS | FRONT).items()},
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CLASS_LINES = 350
# The tour: who reads these five files in this order has seen the engine.
TOUR = ("engine/llm_engine", "engine/scheduler", "engine/model_runner", "kv/kv_cache", "kv/offload")
MAX_TOUR_LINES, MAX_TOUR_FILE_LINES, MAX_ENGINE_CLASS_LINES = 1392, 350, 160
MAX_CORE_LINES = 6597  # of engine/ and kv/ together
CODE_RUNNING_FORMATS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib"}

Rule = Callable[[str, ast.Module], Iterator[str]]


def check_package(folder: Path) -> list[str]:
    """Every violation in the package at `folder`, each beginning with the file's name."""
    found: list[str] = []
    trees: dict[str, ast.Module] = {}
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        source = path.read_text(encoding="utf-8")
        trees[name] = ast.parse(source)
        found += [f"{name}.py: {text}" for text in check_file(name, source, trees[name])]
    return found + list(public_docstrings(trees))


def check_file(name: str, source: str, tree: ast.Module) -> Iterator[str]:
    """Violations in one file; `name` is its path in the package without the suffix."""
    if place_of(name) not in LAW:
        yield "has no place in the import law: give it one in LAW, or move it into a folder"
        return
    limit = MAX_TOUR_FILE_LINES if name in TOUR else MAX_FILE_LINES
    if (lines := len(source.splitlines())) > limit:
        yield f"{lines} lines, the limit is {limit}"
    for rule in RULES:
        yield from rule(name, tree)


@functools.lru_cache(1)  # the rules read one file after the other
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def place_of(name: str) -> str:
    """The folder of a file, or the file itself where it lies in none."""
    return name.partition("/")[0]


def import_law(name: str, tree: ast.Module) -> Iterator[str]:
    place = place_of(name)
    for target in sorted(imported_places(tree) - {place}):
        if target not in LAW:
            yield f"imports {target}, which has no place in the import law"
        elif target not in LAW[place]:
            yield f"{place} may not import {target}"


def imported_places(tree: ast.Module) -> set[str]:
    """Folders and files of the package imported anywhere in `tree`; `__init__` is the package."""
    places: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            places |= {place_in(alias.name) for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                places.add("a relative name")
            elif origin == PACKAGE:
                names = {alias.name for alias in node.names}
                places |= {name if name in LAW else "__init__" for name in names}
            elif is_ours(origin):
                places.add(place_in(origin))
    return places


def is_ours(dotted: str) -> bool:
    return dotted.split(".")[0] == PACKAGE


def place_in(dotted: str) -> str:
    return [*dotted.split("."), "__init__"][1]


def no_global_statement(_: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}; keep state on an object"


def no_type_checking_block(name: str, tree: ast.Module) -> Iterator[str]:
    if name == "__init__":  # what it brings late, an editor sees at once
        return
    for node in nodes_of(tree):
        if "TYPE_CHECKING" in (getattr(node, "id", None), getattr(node, "attr", None)):
            yield "TYPE_CHECKING; the law makes it needless"


def nothing_that_runs_a_files_code(_: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        for dotted in names_used(node):
            if dotted.split(".")[0] in CODE_RUNNING_FORMATS or dotted == "torch.load":
                yield f"{dotted} can run code that a file holds"
        # Left out, transformers may ask on the terminal; a plain False refuses.
        is_trust = isinstance(node, ast.keyword) and node.arg == "trust_remote_code"
        if is_trust and ast.unparse(node) != "trust_remote_code=False":
            yield "trust_remote_code may only be False"


def names_used(node: ast.AST) -> list[str]:
    """Dotted names that `node` imports or, for `module.name`, uses."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return [f"{node.value.id}.{node.attr}"]
    return []


def short_functions(_: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Parameters aside: those of a GPU's kernel alone are thirty lines.
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"


def short_classes(_: str, tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            limit = MAX_ENGINE_CLASS_LINES if node.name == "LLMEngine" else MAX_CLASS_LINES
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > limit:
                yield f"{node.name} has {lines} lines, the limit is {limit}"


def one_writer_of_num_computed(name: str, tree: ast.Module) -> Iterator[str]:
    """What has KV is said in one place: BlockTable.commit."""
    if name == "kv/block_table":
        return
    for node in nodes_of(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign):
            targets = [node.target]
        if any(getattr(target, "attr", None) == "num_computed" for target in targets):
            yield f"line {node.lineno}: sets num_computed, which only BlockTable.commit does"


def module_docstring(_: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "has no docstring: say what it owns and what it does not know"


def public_docstrings(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Public functions and methods without a docstring, over all files of the package.

    A method needs none if a Protocol or base class has a documented one of its name; a Protocol's
    bare declaration (`...`) needs none if any class has that, or a field of its name.
    """
    classes = [n for tree in trees.values() for n in nodes_of(tree) if isinstance(n, ast.ClassDef)]
    bases = {base for node in classes for base in base_names(node)}
    anywhere = {name for node in classes for name in documented_methods(node) | field_names(node)}
    inherited = {
        name
        for node in classes
        if node.name in bases or "Protocol" in base_names(node)
        for name in documented_methods(node)
    }
    for file, tree in trees.items():
        public = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"]
        for owner in (tree, *public):
            for node in functions_of(owner):
                documented = anywhere if is_bare(node) else inherited
                is_inherited = isinstance(owner, ast.ClassDef) and node.name in documented
                if node.name[0] != "_" and not ast.get_docstring(node) and not is_inherited:
                    yield f"{file}.py: line {node.lineno}: {node.name} has no docstring"


def is_bare(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its body is `...`."""
    only = node.body[0] if len(node.body) == 1 else None
    return isinstance(only, ast.Expr) and getattr(only.value, "value", None) is ...


def functions_of(owner: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in owner.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def documented_methods(node: ast.ClassDef) -> set[str]:
    return {function.name for function in functions_of(node) if ast.get_docstring(function)}


def field_names(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}


def base_names(node: ast.ClassDef) -> set[str]:
    """Names of the base classes, without modules and type parameters."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}


def public_names(name: str, tree: ast.Module) -> Iterator[str]:
    """`__all__` of the package: every public name, nothing else, in ruff's order."""
    if name != "__init__":
        return
    exported = literal_all(tree)
    if exported is None:
        yield "has no literal __all__"
        return
    bound = bound_names(tree)
    public = {n for n in bound if not n.startswith("_")}
    if missing := sorted(public - set(exported)):
        yield f"__all__ lacks {', '.join(missing)}"
    if unknown := sorted(set(exported) - bound):
        yield f"__all__ names {', '.join(unknown)}, which nothing defines"
    if exported != sorted(set(exported), key=export_order):
        yield "__all__ is not sorted, or names something twice"


def literal_all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in assigned_names(node):
            return list(ast.literal_eval(node.value)) if node.value else None
    return None


def bound_names(tree: ast.Module) -> set[str]:
    """Names that the module's top level binds, `from __future__` aside."""
    bound: set[str] = set()
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    for node in itertools.chain(tree.body, *blocks):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", None) != "__future__":
                bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            bound |= assigned_names(node)
    return bound


def assigned_names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {ast.unparse(target) for target in targets}


def export_order(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then the rest: the order ruff's RUF022 writes."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


RULES: tuple[Rule, ...] = (
    import_law,
    no_global_statement,
    no_type_checking_block,
    nothing_that_runs_a_files_code,
    short_functions,
    short_classes,
    one_writer_of_num_computed,
    module_docstring,
    public_names,
)


def tree_in(readme: str) -> list[str]:
    """First words that are files or folders, in the first block that opens with the line ```tree,
    but for the folder that they are in.
    """
    block = re.search(r"^```tree\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        return []
    words = (line.lstrip(" │├└─").partition(" ")[0] for line in block[1].splitlines())
    return [word for word in words if word.endswith((".py", "/")) and word != f"{PACKAGE}/"]


def test_the_package_keeps_the_law() -> None:
    assert check_package(ROOT / PACKAGE) == []


def test_the_tour_and_the_core_stay_small() -> None:
    def lines(path: Path) -> int:
        return len(path.read_text(encoding="utf-8").splitlines())

    package = ROOT / PACKAGE
    assert sum(lines(package / f"{name}.py") for name in TOUR) <= MAX_TOUR_LINES
    core = [path for folder in ("engine", "kv") for path in (package / folder).rglob("*.py")]
    assert sum(map(lines, core)) <= MAX_CORE_LINES


def test_readme_tree_is_the_package() -> None:
    """Folders and the files beside them; what is in a folder its own first lines say."""
    entries = (ROOT / PACKAGE).iterdir()
    there = {p.name + "/" * p.is_dir() for p in entries if p.name != "__pycache__"}
    assert set(tree_in((ROOT / "README.md").read_text(encoding="utf-8"))) == there - {"py.typed"}
    assert len(there) <= 24


def test_the_law_has_no_circle() -> None:
    assert circle({place: targets - BASE.keys() for place, targets in LAW.items()}) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        dotted = ".".join(parts[: -1 if parts[-1] == "__init__" else None])
        files[dotted] = imported_files(ast.parse(path.read_text(encoding="utf-8"))) - {dotted}
    files = {name: targets & files.keys() - {PACKAGE} for name, targets in files.items()}
    assert circle(files) == []


def imported_files(tree: ast.Module) -> set[str]:
    """All that an import may name, files or not."""
    found: set[str] = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that lead to one another: those that are left when all without arrows have gone."""
    left = {name: set(targets) for name, targets in graph.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys() - {name}]:
        for name in free:
            del left[name]
    return sorted(left)


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert circle(graph) == ["a", "b", "c", "d"]
    assert circle(graph | {"c": set()}) == []


# What follows tests the checker: one planted violation of each kind.

DOCSTRING = '"""Owns nothing, knows nothing."""\n'


def plant(folder: Path, **files: str) -> list[str]:
    """Violations of a package made of `files`, each given a docstring; kv__offload is in kv/."""
    for name, source in files.items():
        path = folder / f"{name if name.startswith('__') else name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(DOCSTRING + source, encoding="utf-8")
    return check_package(folder)


def test_a_lawful_package_has_no_violations(tmp_path: Path) -> None:
    found = plant(
        tmp_path,
        errors="class EngineError(Exception): ...\n",
        config="from nanoengine.errors import EngineError\n",
        sequence="from nanoengine import outputs\n",
        attention__select="from nanoengine.kernels import cpu_kernels\nimport torch\n",
        kv__kv_cache="import nanoengine.kv.offload\nfrom nanoengine import context\n",
        loading__loader="f(trust_remote_code=False)\n",
        devices__device="class D(Protocol):\n    def f(self): 'Doc.'\n    def g(self): ...\n",
        devices__cpu="class C:\n    def f(self): pass\n    def g(self): 'Doc.'\n",
        devices__b="class B:\n    def k(self): 'Doc.'\nclass A(B):\n    def k(self): pass\n",
        api__llm="import nanoengine.engine.llm_engine\n",
        __init__=(
            "from nanoengine.api.llm import LLM\n"
            "from nanoengine.errors import EngineError\n"
            '__all__ = ["LLM", "EngineError", "__version__"]\n'
            '__version__ = "1"\n'
        ),
    )
    assert found == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("sequence", "from nanoengine.api.llm import LLM", "sequence may not import api"),
        ("errors", "import nanoengine.config", "errors may not import config"),
        ("kv__offload", "from nanoengine import models", "kv may not import models"),
        ("models__quant", "from nanoengine.kv.kv_cache import KV", "models may not import kv"),
        ("models__quant", "from . import layers", "imports a relative name"),
        (
            "startup__probe",
            "def _f():\n    import nanoengine.engine.model_runner",
            "startup may not import engine",
        ),
        (
            "loading__loader",
            "from nanoengine import __version__",
            "loading may not import __init__",
        ),
        ("loading__loader", "from nanoengine.utils import x", "imports utils, which has no place"),
        ("engine__a", "import nanoengine.bench.main", "engine may not import bench"),
        (
            "__init__",
            "import nanoengine.loading.loader as _l\n__all__ = []",
            "__init__ may not import loading",
        ),
        ("utils", "", "has no place in the import law"),
        ("devices__a", "def _f():\n    global x, y\n    x = 1", "line 3: global x, y"),
        ("config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING: ...", "TYPE_CHECKING"),
        ("config", "import typing\nif typing.TYPE_CHECKING: ...", "TYPE_CHECKING"),
        ("config", "import pickle", "pickle can run code"),
        ("config", "from pickle import loads", "pickle.loads can run code"),
        ("config", "import torch\nx = torch.load('f')", "torch.load can run code"),
        ("config", "from torch import load", "torch.load can run code"),
        ("config", "f(trust_remote_code=x)", "trust_remote_code may only be False"),
        ("config", "def _f():\n" + "    x = 1\n" * 61, "_f has 61 lines, the limit is 60"),
        ("config", "x = 1\n" * 600, "601 lines, the limit is 600"),
        ("kv__offload", "x = 1\n" * 350, "351 lines, the limit is 350"),
        ("config", "class _A:\n" + "    x = 1\n" * 350, "_A has 351 lines, the limit is 350"),
        (
            "engine__llm_engine",
            "class LLMEngine:\n    'Doc.'\n" + "    x = 1\n" * 159,
            "LLMEngine has 161 lines, the limit is 160",
        ),
        ("kv__kv_cache", "def _f(seq):\n    seq.num_computed = 0", "line 3: sets num_computed"),
        ("kv__kv_cache", "def _f(seq):\n    seq.num_computed += 1", "line 3: sets num_computed"),
        ("config", "def f(): ...", "line 2: f has no docstring"),
        ("config", "class A:\n    async def f(self): ...", "line 3: f has no docstring"),
        (
            "config",
            "class A:\n    def f(self): 'Doc.'\nclass B:\n    def f(self): pass",
            "line 5: f",
        ),
        ("config", "class A(Protocol):\n    def f(self): ...", "line 3: f has no docstring"),
        ("__init__", "x = 1", "has no literal __all__"),
        ("__init__", "x = 1\n__all__ = []", "__all__ lacks x"),
        ("__init__", "__all__ = ['x']", "__all__ names x, which nothing defines"),
        ("__init__", "b = a = LLM = Ab = 1\n__all__ = ['Ab', 'LLM', 'a', 'b']", "is not sorted"),
        ("__init__", "a = 1\n__all__ = ['a', 'a']", "names something twice"),
    ],
)
def test_a_planted_violation_is_reported(
    tmp_path: Path, name: str, source: str, expected: str
) -> None:
    found = plant(tmp_path, **{name: source})
    assert len(found) == 1, found
    path = name if name == "__init__" else name.replace("__", "/")
    assert found[0].startswith(f"{path}.py: ")
    assert expected in found[0]


def test_files_in_folders_and_without_docstring_are_reported(tmp_path: Path) -> None:
    (tmp_path / "maths").mkdir()
    (tmp_path / "maths" / "layers.py").write_text(DOCSTRING, encoding="utf-8")
    (tmp_path / "errors.py").write_text("x = 1\n", encoding="utf-8")
    assert [text.partition(":")[0] for text in check_package(tmp_path)] == [
        "errors.py",
        "maths/layers.py",
    ]


def test_no_helper_of_tests_sets_threads_when_it_is_imported() -> None:
    """The first test that imports it would run on other threads than those before it."""
    for path in sorted((ROOT / "tests" / "helpers").glob("*.py")):
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            assert "set_num_threads" not in ast.unparse(statement) or isinstance(
                statement, ast.FunctionDef | ast.ClassDef
            ), path.name


def test_readme_tree_takes_the_first_word_of_each_line() -> None:
    tree = "nanoengine/\n├── ray.py   imports api/\n└── kv/  x.c\n"
    readme = f"a\n\n```tree\n{tree}```\n\n```\nb.py\n```\n"
    assert tree_in(readme) == ["ray.py", "kv/"]
    assert tree_in("```\nray.py\n```\n") == []
