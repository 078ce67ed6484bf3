"""Runs the cells of docs/notebook.ipynb and writes it with their outputs: `make notebook`.

The cells are here, so that what a notebook shows is what ran.
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
TIMEOUT_S = 600  # of one cell
TEXT, CODE = "markdown", "code"
CELLS = (
    (
        TEXT,
        "# nanoengine in a notebook\n\nA model, an answer, a stream, a conversation, and a text "
        "that does not fit the memory given to it. Written by `make notebook`.",
    ),
    (
        CODE,
        "from nanoengine import LLM, SamplingParams\n\n"
        "# 4 blocks of 256 tokens on the device; what does not fit goes to RAM.\n"
        'llm = LLM("smollm2-135m", num_gpu_blocks=4, kv_offload_gib=0.25)\n'
        "llm.plan",
    ),
    (
        CODE,
        "params = SamplingParams(temperature=0, max_tokens=24)\n"
        'llm.generate("The capital of France is", params)[0].outputs[0].text',
    ),
    (TEXT, "A stream gives strings as they come; leaving the loop ends the request."),
    (CODE, 'for delta in llm.stream("The sea is", params):\n    print(delta, end="", flush=True)'),
    (
        CODE,
        'question = [{"role": "user", "content": "Name three rivers."}]\n'
        "print(llm.chat(question, params)[0].outputs[0].text)",
    ),
    (TEXT, "A text of some 2,000 tokens, twice what the device holds."),
    (
        CODE,
        'text = "The river ran on, and the mill stood by the river. " * 150 + "The mill"\n'
        "(output,) = llm.generate([text], params)\n"
        'print(len(output.prompt_token_ids), "tokens in;", output.outputs[0].text)\n'
        "print(llm.stats())",
    ),
    (TEXT, "Sampling parameters may be a dict, and errors end at your own line:"),
    (
        CODE,
        "from nanoengine import EngineError\n\n"
        "try:\n"
        '    llm.generate("Hello", {"max_new_tokens": 5})\n'
        "except EngineError as error:\n"
        "    print(error)",
    ),
    (TEXT, "`AsyncLLM` serves many callers; a notebook may await it."),
    (
        CODE,
        "from nanoengine import AsyncLLM\n\n"
        "llm.close()\n"
        'async with AsyncLLM("smollm2-135m") as shared:\n'
        '    async for output in shared.generate("The moon is", params):\n'
        "        text = output.outputs[0].text  # all so far\n"
        "print(text)",
    ),
)


def make() -> dict[str, Any]:
    """The notebook with outputs. Raises CellExecutionError if a cell fails."""
    nbformat: Any = import_module("nbformat")  # untyped, and installed for the docs alone
    client: Any = import_module("nbclient").NotebookClient
    config: Any = import_module("traitlets.config").Config

    made = nbformat.v4.new_notebook()
    for number, (kind, source) in enumerate(CELLS):
        new = nbformat.v4.new_markdown_cell if kind == TEXT else nbformat.v4.new_code_cell
        made.cells.append(new(source, id=f"cell-{number}"))
    files = config({"KernelManager": {"transport": "ipc"}})  # and no network ports
    client(made, timeout=TIMEOUT_S, kernel_name="python3", config=files).execute()
    for cell in made.cells:
        cell.metadata = {}
    made.metadata = {"language_info": {"name": "python"}}
    written: dict[str, Any] = json.loads(nbformat.writes(made))
    return written


def tidied(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook without the bars' lines on stderr, and what a cell prints as one output."""
    for cell in notebook["cells"]:
        kept: list[dict[str, Any]] = []
        for out in cell.get("outputs", ()):
            if out.get("name") == "stderr":
                continue
            if kept and out.get("name") == "stdout" == kept[-1].get("name"):
                kept[-1]["text"] = "".join([*kept[-1]["text"], *out["text"]])
            else:
                kept.append(out)
        if cell["cell_type"] == CODE:
            cell["outputs"] = kept
    return notebook


def main() -> None:
    """Write the notebook."""
    text = json.dumps(tidied(make()), indent=1, ensure_ascii=False)
    NOTEBOOK.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE) + "\n", encoding="utf-8")
    print(f"wrote {NOTEBOOK.relative_to(NOTEBOOK.parents[1])}")


if __name__ == "__main__":
    main()
