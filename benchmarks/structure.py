"""Size of the source tree: `python benchmarks/structure.py [ROOT]` counts this tree or another.

Counts lines and names in the sources. To find the files that a decode step enters, it runs one step
of SmolLM2 under a profiler, without and with KV on the host. Prints one JSON object.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TOUR = ("llm_engine", "scheduler", "model_runner", "kv_cache", "offload")
FEATURES = {
    "logprobs": ("logprob",),
    "completions": ("num_candidates", "completion"),
    "beam search": ("beam",),
    "speculation": ("guess", "speculat"),
    "windows": ("window",),
    "int8 on the host": ("int8", "codec"),
    "running ahead": ("ahead",),
    "replay": ("tape", "graphs", "replay"),
}
STEP = """
import json, sys
from pathlib import Path
import nanoengine
from nanoengine import LLM, SamplingParams
root, seen = Path(nanoengine.__file__).parent, set()
def enter(frame, event, _):
    path = Path(frame.f_code.co_filename)
    if event == "call" and root in path.parents:
        seen.add(path.relative_to(root).as_posix())
settings = {} if sys.argv[1] == "resident" else dict(
    enable_cpu_offload=True, num_gpu_blocks=2, kv_offload_gib=0.1, kvcache_block_size=16)
with LLM("smollm2-135m", num_threads=1, kv_cache_gib=None if settings else 0.1, **settings) as llm:
    engine = llm.llm_engine
    engine.add_request([5] * 80, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    for _ in range(4):
        engine.step()
    sys.setprofile(enter)
    engine.step()
    sys.setprofile(None)
print(json.dumps(sorted(seen)))
"""


def main() -> None:
    """Print the counts of the tree at argv[1], or of this tree."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    print(json.dumps(counts(root) | {"decode step": steps(root)}, indent=1))


def counts(root: Path) -> dict[str, object]:
    """Counts from reading the sources."""
    package = root / "nanoengine"
    entries = [path for path in package.iterdir() if path.name != "__pycache__"]
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    nodes = [(path, node) for path, text in sources.items() for node in ast.walk(ast.parse(text))]
    classes = [(lines_of(n), n.name) for _, n in nodes if isinstance(n, ast.ClassDef)]
    functions = [
        f"{path.stem}.{n.name} {lines_of(n)}"
        for path, n in nodes
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and lines_of(n) > 50
    ]
    tour = {path.stem: len(t.splitlines()) for path, t in sources.items() if path.stem in TOUR}
    return {
        "entries": len(entries),
        "folders": sum(path.is_dir() for path in entries),
        "files": len(sources),
        "lines": sum(len(text.splitlines()) for text in sources.values()),
        "tour": tour | {"together": sum(tour.values())},
        "biggest classes": [f"{name} {lines}" for lines, name in sorted(classes)[:-4:-1]],
        "functions over 50 lines": functions,
        "files that name a feature": {
            name: sum(names(text, words) for text in sources.values())
            for name, words in FEATURES.items()
        },
    }


def lines_of(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first to the last, without decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def names(text: str, words: tuple[str, ...]) -> bool:
    """Whether an identifier of the source contains one of the words."""
    return any(word in name for name in identifiers(text) for word in words)


def identifiers(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(found := getattr(node, field, None), str):
                yield found.lower()


def steps(root: Path) -> dict[str, object]:
    """Files and folders that one decode step enters."""
    found: dict[str, object] = {}
    for kind in ("resident", "with KV on the host"):
        command = [sys.executable, "-c", STEP, kind]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        files = json.loads(done.stdout.splitlines()[-1])
        folders = {name.partition("/")[0] for name in files if "/" in name}
        found[kind] = {"files": len(files), "folders": len(folders), "names": files}
    return found


if __name__ == "__main__":
    main()
