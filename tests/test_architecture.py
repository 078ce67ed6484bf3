"""The law of the source tree, held by reading it: who may import whom, and what no file may do.

`check_package` returns a sentence for each violation; nothing is imported or run. The last section
plants one violation of each kind and expects that sentence, so a checker that sees nothing fails.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "nanoengine"

# A file imports only rows above its own ...
ROWS = (
    (
        *("errors", "checked_values", "config", "sampling_params", "metrics", "collector"),
        *("home_process", "cache_folders", "turns"),
    ),
    (
        *("sequence", "context", "copy_streams", "device", "outputs"),
        *("stream_check", "streaming"),
    ),
    (
        *("block_manager", "block_table", "step_plan", "placement", "host_pool", "offload"),
        *("kv_codec", "kv_spec", "step_kv", "kv_cache"),
    ),
    (
        *(
            "call_tape",
            "cpu_kernels",
            "cpu_linear",
            "kernels",
            "quant",
            "cuda_graph",
            "flash_attention",
            "triton_attention_kernels",
            "triton_attention",
            "triton_kernels",
            "attention",
        ),
        *("rope", "layers", "models", "structured", "speculative", "sampler"),
    ),
    (
        *("model_cache", "hub", "template_worker", "template_process", "chat_template"),
        "tokenizer",
        *("gguf_structure", "gguf_metadata", "gguf_tokenizer", "gguf_convert"),
        *("checked_json", "rope_json", "generation_config", "loader"),
    ),
    ("memory_plan", "scheduler", "model_runner", "probe"),
    ("input_processor", "llm_engine", "beam_search", "llm", "async_llm"),
    (
        *("benchmark_limits", "peers", "benchmark_compare", "benchmark_tiers"),
        *("benchmark_scaling", "benchmark_quant", "benchmark"),
        *("niah", "ruler", "server", "cli", "__init__", "__main__"),
    ),
)
# ... and, inside its row, only what is listed here. Everyone may import errors.
ARROWS = {
    "config": {"checked_values"},
    "sampling_params": {"checked_values"},
    "context": {"sequence"},
    "block_table": {"block_manager"},
    "placement": {"block_manager", "step_plan"},
    "host_pool": {"step_plan"},
    "offload": {"host_pool", "kv_codec", "step_plan"},
    "kv_spec": {"kv_codec"},
    "step_kv": {
        *("block_manager", "block_table", "step_plan", "placement", "offload", "kv_spec"),
    },
    "kv_cache": {
        *("block_manager", "block_table", "step_plan", "placement", "offload", "kv_spec"),
        "step_kv",
    },
    "attention": {"kernels", "cpu_kernels", "flash_attention", "triton_attention"},
    "cpu_kernels": {"call_tape"},
    "cpu_linear": {"call_tape", "cpu_kernels"},
    "layers": {"quant", "cpu_kernels", "cpu_linear"},
    "models": {"layers", "rope"},
    "sampler": {"structured", "speculative"},
    "triton_attention": {"triton_attention_kernels"},
    "outputs": {"sequence"},
    "turns": {"home_process"},
    "device": {"copy_streams"},
    "stream_check": {"copy_streams", "device"},
    "streaming": {"sequence", "outputs"},
    "template_process": {"template_worker"},
    "chat_template": {"template_process"},
    "tokenizer": {"chat_template", "checked_json", "template_process"},
    "gguf_metadata": {"gguf_structure"},
    "gguf_tokenizer": {"gguf_metadata"},
    "gguf_convert": {"gguf_structure", "gguf_metadata", "gguf_tokenizer"},
    "rope_json": {"checked_json"},
    "loader": {"checked_json", "rope_json", "model_cache", "hub", "gguf_convert", "tokenizer"},
    "generation_config": {"checked_json"},
    "probe": {"model_runner"},
    "llm_engine": {"input_processor"},
    "beam_search": {"llm_engine"},
    "llm": {"llm_engine", "beam_search"},
    "async_llm": {"llm"},
    "benchmark_compare": {"benchmark_limits", "peers"},
    "benchmark_scaling": {"benchmark_limits"},
    "benchmark_quant": {"benchmark_limits"},
    "benchmark": {
        *("__init__", "benchmark_tiers", "benchmark_scaling", "benchmark_compare"),
        "benchmark_quant",
    },
    "ruler": {"__init__", "niah"},
    "cli": {"server", "benchmark", "ruler"},
    "__main__": {"cli"},
}
# Maths (row 3) and memory (row 2) meet in context.py alone.
CLOSED_ROWS = {3: 2}
# The package itself shows what users import, and pulls in nothing else by name.
INIT_IMPORTS = {
    *("llm", "async_llm", "sampling_params", "errors", "outputs", "streaming", "collector"),
}
ROW_OF = {name: i for i, row in enumerate(ROWS) for name in row}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
CODE_RUNNING_FORMATS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "joblib"}

Rule = Callable[[str, ast.Module], Iterator[str]]


def check_package(folder: Path) -> list[str]:
    """Every violation in the package at `folder`, each beginning with the file's name."""
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        source = path.read_text(encoding="utf-8")
        found += [f"{name}.py: {text}" for text in check_file(name, source)]
    return found


def check_file(name: str, source: str) -> Iterator[str]:
    """Violations in one file; `name` is its path in the package without the suffix."""
    if name not in ROW_OF:
        yield "has no row in the import law: give it one in ROWS, or move its code elsewhere"
        return
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{lines} lines, the limit is {MAX_FILE_LINES}"
    tree = ast.parse(source)
    for rule in RULES:
        yield from rule(name, tree)


def import_law(name: str, tree: ast.Module) -> Iterator[str]:
    for target in sorted(imported_modules(tree)):
        if target not in ROW_OF:
            yield f"imports {target}, which has no row in the import law"
        elif not may_import(name, target):
            yield f"row {ROW_OF[name]} may not import {target} (row {ROW_OF[target]})"


def may_import(name: str, target: str) -> bool:
    if name == "__init__":
        return target in INIT_IMPORTS
    if target == "errors" and name != "errors":
        return True
    row, target_row = ROW_OF[name], ROW_OF[target]
    if row == target_row:
        return target in ARROWS.get(name, ())
    return target_row < row and CLOSED_ROWS.get(row) != target_row


def imported_modules(tree: ast.Module) -> set[str]:
    """Files of the package imported anywhere in `tree`; `__init__` is the package itself."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {module_of(alias.name) for alias in node.names if is_ours(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            origin = absolute_origin(node)
            if origin == PACKAGE:
                names = {alias.name for alias in node.names}
                modules |= {name if name in ROW_OF else "__init__" for name in names}
            elif is_ours(origin):
                modules.add(module_of(origin))
    return modules


def absolute_origin(node: ast.ImportFrom) -> str:
    """`from . import x` and `from .y import x` as if written in full: the package is flat."""
    if node.level == 0:
        return node.module or ""
    return f"{PACKAGE}.{node.module}" if node.module else PACKAGE


def is_ours(dotted: str) -> bool:
    return dotted.split(".")[0] == PACKAGE


def module_of(dotted: str) -> str:
    return dotted.partition(".")[2] or "__init__"


def no_global_statement(_: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}; keep state on an object"


def no_type_checking_block(_: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if "TYPE_CHECKING" in (getattr(node, "id", None), getattr(node, "attr", None)):
            yield "TYPE_CHECKING; the rows make it needless"


def nothing_that_runs_a_files_code(_: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
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
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Parameters aside: those of a GPU's kernel alone are thirty lines.
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} has {lines} lines, the limit is {MAX_FUNCTION_LINES}"


def module_docstring(_: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree):
        yield "has no docstring: say what it owns and what it does not know"


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
    blocks = [node.body for node in tree.body if isinstance(node, ast.With)]
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
    module_docstring,
    public_names,
)


def tree_in(readme: str) -> list[str]:
    """First words that are file names, in the first block that opens with the line ```tree."""
    block = re.search(r"^```tree\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    if block is None:
        return []
    words = (line.lstrip(" │├└─").partition(" ")[0] for line in block[1].splitlines())
    return [word for word in words if word.endswith((".py", ".c"))]


def test_the_package_keeps_the_law() -> None:
    assert check_package(ROOT / PACKAGE) == []


def test_readme_tree_is_the_package() -> None:
    readme = ROOT / "README.md"
    files = [p.name for p in (ROOT / PACKAGE).iterdir() if p.suffix in (".py", ".c")]
    assert sorted(tree_in(readme.read_text(encoding="utf-8"))) == sorted(files)


def test_every_arrow_stays_inside_its_row() -> None:
    for name, targets in ARROWS.items():
        assert {ROW_OF[target] for target in targets} == {ROW_OF[name]}


# What follows tests the checker: one planted violation of each kind.

DOCSTRING = '"""Owns nothing, knows nothing."""\n'


def plant(folder: Path, **files: str) -> list[str]:
    """Violations of a package made of `files`, each given a docstring."""
    for name, source in files.items():
        (folder / f"{name}.py").write_text(DOCSTRING + source, encoding="utf-8")
    return check_package(folder)


def test_a_lawful_package_has_no_violations(tmp_path: Path) -> None:
    found = plant(
        tmp_path,
        errors="class EngineError(Exception): ...\n",
        config="from nanoengine.errors import EngineError\n",
        context="from nanoengine import sequence\n",
        attention="from nanoengine import context, kernels\nimport torch\n",
        loader="f(trust_remote_code=False)\n",
        llm="import nanoengine.llm_engine\n",
        __init__=(
            "from nanoengine.llm import LLM\n"
            "from nanoengine.errors import EngineError\n"
            '__all__ = ["LLM", "EngineError", "__version__"]\n'
            '__version__ = "1"\n'
        ),
    )
    assert found == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("sequence", "from nanoengine.llm import LLM", "row 1 may not import llm (row 6)"),
        ("errors", "import nanoengine.config", "row 0 may not import config (row 0)"),
        ("offload", "from nanoengine import kv_cache", "row 2 may not import kv_cache (row 2)"),
        ("models", "from .kv_cache import KV", "row 3 may not import kv_cache (row 2)"),
        ("models", "from . import offload as o", "row 3 may not import offload (row 2)"),
        ("quant", "def f():\n    import nanoengine.layers", "row 3 may not import layers (row 3)"),
        ("loader", "from nanoengine import __version__", "row 4 may not import __init__ (row 7)"),
        ("loader", "from nanoengine.utils import x", "imports utils, which has no row"),
        ("__init__", "import nanoengine.loader as _l\n__all__ = []", "row 7 may not import loader"),
        ("utils", "", "has no row in the import law"),
        ("device", "def f():\n    global x, y\n    x = 1", "line 3: global x, y"),
        ("device", "from typing import TYPE_CHECKING\nif TYPE_CHECKING: ...", "TYPE_CHECKING"),
        ("device", "import typing\nif typing.TYPE_CHECKING: ...", "TYPE_CHECKING"),
        ("loader", "import pickle", "pickle can run code"),
        ("loader", "from pickle import loads", "pickle.loads can run code"),
        ("loader", "import torch\nx = torch.load('f')", "torch.load can run code"),
        ("loader", "from torch import load", "torch.load can run code"),
        ("loader", "f(trust_remote_code=x)", "trust_remote_code may only be False"),
        ("layers", "def f():\n" + "    x = 1\n" * 61, "f has 61 lines, the limit is 60"),
        ("layers", "x = 1\n" * 600, "601 lines, the limit is 600"),
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
    assert found[0].startswith(f"{name}.py: ")
    assert expected in found[0]


def test_files_in_folders_and_without_docstring_are_reported(tmp_path: Path) -> None:
    (tmp_path / "maths").mkdir()
    (tmp_path / "maths" / "layers.py").write_text(DOCSTRING, encoding="utf-8")
    (tmp_path / "llm.py").write_text("x = 1\n", encoding="utf-8")
    assert [text.partition(":")[0] for text in check_package(tmp_path)] == [
        "llm.py",
        "maths/layers.py",
    ]


def test_readme_tree_takes_the_first_word_of_each_line() -> None:
    tree = "nanoengine/\n├── llm.py   imports llm_engine.py\n└── x.c\n"
    readme = f"a\n\n```tree\n{tree}```\n\n```\nb.py\n```\n"
    assert tree_in(readme) == ["llm.py", "x.c"]
    assert tree_in("```\nllm.py\n```\n") == []
