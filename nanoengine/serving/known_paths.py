"""Paths of OpenAI's, Ollama's and other servers that are not here, and what to do instead."""

from __future__ import annotations

ANYTHING_ELSE = "GET /openapi.json lists what there is"
# The part of a path after /v1 (or the whole of Ollama's): what an error says.
MISSING = (
    (
        ("embeddings", "rerank", "score", "classify", "pooling", "moderations"),
        "a model writes text here; it computes no embeddings, scores or classes",
    ),
    (("images", "audio", "videos", "realtime"), "a model reads and writes text alone"),
    (
        ("files", "batches", "messages/batches"),
        "files of requests are answered by: nanoengine batch IN.jsonl OUT.jsonl --model MODEL",
    ),
    (("responses",), "answers are not kept; send the whole conversation as input"),
    (
        ("assistants", "threads", "conversations", "vector_stores"),
        "nothing is kept between requests; POST /v1/chat/completions answers a conversation",
    ),
    (("fine_tuning", "load_lora_adapter"), "weights stay as they were loaded"),
    (
        ("api",),
        "this is no server of Ollama's; give its client for OpenAI's API the address with /v1",
    ),
)


def about_path(path: str) -> str:
    """What the error about a path that is not here says after its name."""
    below = path.removeprefix("/v1").lstrip("/") + "/"
    for beginnings, sentence in MISSING:
        if below.startswith(tuple(f"{each}/" for each in beginnings)):
            return sentence
    return ANYTHING_ELSE
