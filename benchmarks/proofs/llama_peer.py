"""llama.cpp's side of beside_llama.py, run by the interpreter in which llama-cpp-python is
installed: `PYTHON llama_peer.py WORK.json`.

WORK.json holds a list of tasks, done up to the first that fails:
{"model", "prompt", "forced", "out"}: the logits after every token of the prompt, computed in one
batch, and after each forced token, computed alone, in fp32, go to the file `out` (numpy).
{"source", "target", "ftype"}: the model in another form (llama_ftype), by llama.cpp's own
quantisers and dequantisers. {"model", "texts"}: their token ids. Prints one line of JSON for each
task: {"ids": ...}, {"ok": true}, or {"error": llama.cpp's words}.

`PYTHON llama_peer.py -` takes a task from each line of its input instead, and does it in a process
of its own, which llama.cpp may end.

Imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

llama_cpp: Any = importlib.import_module("llama_cpp")  # untyped, and not in our environment

F32 = 0  # GGML_TYPE_F32
NO_FLASH_ATTENTION = 0
CONTEXT = 512
SAID: list[str] = []
WORDS = re.compile(r"error loading model|check_tensor|missing|unsupported", re.IGNORECASE)


def _note(level: int, text: bytes, data: Any) -> None:
    SAID.append(text.decode("utf-8", "replace"))


def load(path: str, vocab_only: bool) -> Any:
    """Raises ValueError with llama.cpp's own words."""
    SAID.clear()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = vocab_only
    params.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        lines = [line.strip() for line in "".join(SAID).splitlines() if WORDS.search(line)]
        raise ValueError(" / ".join(lines[-1:]) or "llama.cpp loads no model")
    return model


def logits(task: dict[str, Any]) -> dict[str, Any]:
    """Of the prompt in one batch, then of the forced tokens, each in its own."""
    model = load(task["model"], vocab_only=False)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = CONTEXT
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = F32
    params.flash_attn_type = NO_FLASH_ATTENTION
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise ValueError(" / ".join(SAID[-3:]).strip() or "llama.cpp makes no context")
    vocab = llama_cpp.llama_model_get_vocab(model)
    width = llama_cpp.llama_vocab_n_tokens(vocab)
    batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)
    rows, start = [], 0
    for tokens in (task["prompt"], *([token] for token in task["forced"])):
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
        if status := llama_cpp.llama_decode(context, batch):
            raise ValueError(f"llama_decode returns {status}")
        for i in range(len(tokens)):
            row = llama_cpp.llama_get_logits_ith(context, i)
            rows.append(np.ctypeslib.as_array(row, shape=(width,)).copy())
        start += len(tokens)
    np.save(task["out"], np.stack(rows))
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return {"ok": True}


def write_as(task: dict[str, Any]) -> dict[str, Any]:
    """The model in another form of weights."""
    SAID.clear()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = task["ftype"], 1, True
    if llama_cpp.llama_model_quantize(task["source"].encode(), task["target"].encode(), params):
        raise ValueError(" / ".join(SAID[-3:]).strip())
    return {"ok": True}


def token_ids(task: dict[str, Any]) -> dict[str, Any]:
    """Of each text, with special tokens parsed and added."""
    model = load(task["model"], vocab_only=True)
    vocab = llama_cpp.llama_model_get_vocab(model)
    found = []
    for text in task["texts"]:
        raw = text.encode("utf-8")
        room = 2 * len(raw) + 16
        ids = (ctypes.c_int32 * room)()
        count = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, room, True, True)
        found.append(list(ids[:count]))
    llama_cpp.llama_model_free(model)
    return {"ids": found}


def answer_to(task: dict[str, Any]) -> dict[str, Any]:
    """What one task gives, or llama.cpp's words."""
    try:
        if "ftype" in task:
            return write_as(task)
        return token_ids(task) if "texts" in task else logits(task)
    except ValueError as error:
        return {"error": str(error)}


def apart(task: dict[str, Any]) -> dict[str, Any]:
    """The same of a forked process."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, json.dumps(answer_to(task)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    answer: dict[str, Any] = json.loads(said) if said else {"error": f"ended with {status}"}
    return answer


def main(path: str) -> None:
    """Do all tasks, each answered by a line."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    note = llama_cpp.llama_log_callback(_note)  # kept as long as it is called
    llama_cpp.llama_log_set(note, None)
    is_served = path == "-"
    tasks = map(json.loads, sys.stdin) if is_served else json.loads(Path(path).read_text("utf-8"))
    for task in tasks:
        answer = apart(task) if is_served else answer_to(task)
        out.write(json.dumps(answer) + "\n")
        out.flush()
        if "error" in answer and not is_served:
            break


if __name__ == "__main__":
    main(sys.argv[1])
