"""Writes docs/settings.md, docs/parameters.md, docs/bodies.md and the tables of docs/models.md from
the engine's own data.

`make pages` runs it; a test compares the files with what it would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from models_page import models_page

from nanoengine.api.known_imports import IMPORT, IMPORTS
from nanoengine.cli.flags import PREFIX, SETTINGS
from nanoengine.config.engine import BUDGETS, CHOICES, COUNTS, DTYPES, MAX_GUESSES, EngineConfig
from nanoengine.errors import MAX_COUNT, SEEDS
from nanoengine.sampling_params import MAX_COMPLETIONS, MAX_LOGPROBS, MAX_STOPS
from nanoengine.serving import messages_requests, openai_keys, responses_requests
from nanoengine.serving.openai_keys import (
    CHAT,
    COMMON,
    COMPLETIONS,
    IGNORED,
    MESSAGES,
    OWN,
    PARAMS,
    REFUSED,
    RESPONSES,
    Refused,
)
from nanoengine.serving.openai_requests import MAX_BIASES, MAX_WORD, TEMPLATE_VARIABLES
from nanoengine.text.known_methods import METHOD, METHODS, OF_TOKENIZER, OF_TOKENIZERS
from nanoengine.text.known_names import ARGUMENT, FLAG, PARAMETER, ROWS, SETTING, WORKS, KnownName

KNOWN = {field.name: field for field in fields(EngineConfig)}
DOCS = Path(__file__).parents[2] / "docs"
# What no table of config/engine.py holds; tests/house/test_pages.py tries the ends.
OTHER_VALUES = {
    "tokenizer": "a path",
    "chat_template": "a path, or Jinja code",
    "dtype": ", ".join(sorted(set(DTYPES.values()))),
    "device": "auto, cpu, cuda, xpu, npu; cuda:N, xpu:N, npu:N",
    "gpu_memory_utilization": "above 0, up to 1",
    "speculative": "off, auto, ngram:K, resident:K, mtp:K, ngram:K+resident:K, ngram:K+mtp:K; "
    f"K from 1 to {MAX_GUESSES}",
    "draft_model": "a folder or a hub id",
    "lora": "a folder or a hub id",
    "prefix_cache_file": "a path",
    "debug_copy_delay_ms": "0 to 1000",
}
WRITTEN = "<!-- Written by `make pages`: change the data in nanoengine/, not this page. -->"
SETTINGS_HEAD = f"""\
# Settings

{WRITTEN}

Every setting is a keyword of `LLM(model, ...)` and `AsyncLLM(model, ...)`. For the
[command line](command_line.md) it is a flag, with dashes for underscores, an environment variable,
`{PREFIX}` and its name in capitals, and a line of the YAML file of `--config`. `help(LLM)` shows
all with types and defaults, `help(nanoengine.config.engine.EngineConfig)` explains them at length,
and [Features](features.md) says when to use which. What is None by default is planned at start-up,
or off. Names of other engines: [Parameters](parameters.md).
"""
SETTINGS_TAIL = """\
## Environment

| variable | what it does |
|---|---|
| `NANOENGINE_LOG_LEVEL` | shows what the engine logs on stderr: debug, info, warning or error |
| `NANOENGINE_TRACEBACK` | errors show where in the package they were raised |
| `NANOENGINE_CACHE_GIB` | [most space](command_line.md#disk) of converted models, 64 |
| `NANOENGINE_API_KEY` | the key of [the server](server.md#security) |
| `OMP_NUM_THREADS` | CPU threads, unless `num_threads` is given |
| `CC` | the C compiler for the kernels: gcc, or clang with its OpenMP (`libomp`) |
| `XDG_CACHE_HOME` | the folder above the cache of kernels and converted models |
| `HF_TOKEN`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE` | token, cache and offline mode of the hub |

## Logging

Each file of the package logs to Python's logger of its name, such as
`nanoengine.loading.find_model`; `nanoengine` is above them all. The package never configures the
root logger. A program that has configured logging gets the records like any other; otherwise
warnings go to stderr, and
`NANOENGINE_LOG_LEVEL=info`, or `--log-level info` of the command line, shows more: what start-up
planned, and what it converted.
"""
PARAMETERS_HEAD = f"""\
# Parameters of other engines

{WRITTEN}

The parameters of vLLM, FastDeploy, LMDeploy and nano-vllm as of 2026, and the best known ones of
SGLang, transformers, llama.cpp, Ollama and OpenAI. A name that is not here is an error with the
same words; as a parameter or argument that is None it asks for nothing, and is left out.
`LLM.from_engine_args(args)` and `AsyncLLM.from_engine_args(args)`
take an object such as vLLM's EngineArgs, or a mapping: they translate renamed settings, leave out
values that ask for nothing, and refuse the others. What all of ours do: [Settings](settings.md).
"""
VARIABLES = ", ".join(f"`{name}`" for name in TEMPLATE_VARIABLES)
BODIES_HEAD = f"""\
# Request bodies

{WRITTEN}

The keys of requests over HTTP and, for the first two paths, of the lines of
[nanoengine batch](command_line.md#batch). A key that would change the answer and cannot be obeyed
is an error, and so is a key that nobody knows: it may be a misspelt parameter.
Errors about names of [other engines](parameters.md) say what they are here. `null` is no value.

- `temperature`, `top_p` and others that a body lacks are those of `SamplingParams`, or the model's
  own with `generation_config="auto"`. Without a limit, a chat and a response may fill the context;
  a completion has 16 tokens.
- A `max_tokens` that reaches beyond the context is an error, but at `/v1/messages`, where the
  answer is cut.
- `n` times the number of prompts is at most {MAX_COMPLETIONS:,}; `top_logprobs` and `logprobs` are
  at most {MAX_LOGPROBS}; there are at most {MAX_STOPS} stops and as many `bad_words`, each of at
  most {MAX_WORD:,} characters; `logit_bias` names at most {MAX_BIASES:,} tokens.
- `echo` repeats the prompt before a completion. With `logprobs`, the lists begin with the prompt's
  tokens, the first of which has none; `"max_tokens": 0` asks for the prompt's alone. Such a prompt
  is computed as a whole, also where its KV is cached. Where several texts would repeat more than
  64 Mi characters of prompts, their ids and log-probabilities, the request is refused.
- `return_token_ids` adds vLLM's `token_ids` to choices, and `prompt_token_ids`: of a chat to the
  answer, or to its first chunk; of a completion to each choice.
- `stream_options` has `include_usage` and vLLM's `continuous_usage_stats`, which here counts all
  choices. A chunk may have several tokens: those that came since the last one.
- `cache_salt` keeps the cached KV of users apart who must not learn of each other's prompts by
  the time that theirs take.
- `developer` is another name of the role `system`. Of a content in parts, only texts are read.
- `chat_template_kwargs` may hold {VARIABLES}.
- `/v1/responses` keeps nothing, so `store` changes nothing, and a conversation comes whole in
  `input`. `/v1/messages` goes on after a user's message alone; turns of one role that
  follow each other are one.
"""


def settings_page() -> str:
    """docs/settings.md: a table for each group of settings."""
    parts = [SETTINGS_HEAD]
    for title, group in SETTINGS.items():
        lines = [f"## {title[0].upper()}{title[1:]}", ""]
        lines += ["| setting | type | default | values | what it does |", "|---|---|---|---|---|"]
        for name, text in group.items():
            kind = str(KNOWN[name].type).replace(" | ", " or ")
            default = KNOWN[name].default
            lines.append(f"| `{name}` | {kind} | {default} | {values_of(name)} | {text} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, SETTINGS_TAIL])


def values_of(name: str) -> str:
    """The values that a setting may have, but None."""
    if name in CHOICES:
        return ", ".join(CHOICES[name])
    if KNOWN[name].type in ("bool", "bool | None"):
        return "True, False"
    if name in BUDGETS:
        high, unit = BUDGETS[name]
        return f"above 0, below {_number(high)} {unit}"
    if name in COUNTS:
        low, high = COUNTS[name]
        return "integers of 64 bits" if (low, high) == SEEDS else f"{low} to {_number(high)}"
    return OTHER_VALUES[name]


def _number(value: int) -> str:
    return "2^31 - 1" if value == MAX_COUNT else f"{value:,}"


def parameters_page() -> str:
    """docs/parameters.md: a table for each place where a name is used."""
    parts = [PARAMETERS_HEAD]
    for title, scope in (
        ("Settings of an engine: `LLM(...)`", SETTING),
        ("Parameters of a request: `SamplingParams(...)`", PARAMETER),
        ("Arguments of `generate()` and `chat()`", ARGUMENT),
        ("Names to import from `nanoengine`", IMPORT),
        ("Methods of `LLM` and `AsyncLLM`", METHOD),
        ("Attributes of `llm.get_tokenizer()`", OF_TOKENIZER),
        ("Flags of `vllm serve` that are no settings", FLAG),
    ):
        lines = [f"## {title}", "", "| name | of | here |", "|---|---|---|", *_rows(scope)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _rows(scope: str) -> Iterator[str]:
    others = (*METHODS.values(), *OF_TOKENIZERS.values(), *IMPORTS.values())
    for row in sorted((*ROWS, *others), key=lambda row: row.name):
        if row.scope == scope:
            yield f"| `{row.name}` | {', '.join(row.engines)} | {_what_is_here(row)} |"


def _what_is_here(row: KnownName) -> str:
    return "works" if row.kind == WORKS else row.sentence


def bodies_page() -> str:
    """docs/bodies.md: which keys work, change nothing or are refused."""
    works = {
        CHAT: (*PARAMS, *COMMON, *OWN[CHAT]),
        COMPLETIONS: (*PARAMS, *COMMON, *OWN[COMPLETIONS]),
        RESPONSES: responses_requests.KNOWN,
        MESSAGES: messages_requests.KNOWN,
    }
    parts = [BODIES_HEAD, "## Keys that work\n\n| path | keys |\n|---|---|"]
    parts[-1] += "".join(f"\n| `{path}` | {_names(keys)} |" for path, keys in works.items()) + "\n"
    parts.append(f"## Keys that change nothing\n\n{_names(IGNORED)}.\n")
    for title, refused in (
        (f"`{CHAT}` and `{COMPLETIONS}`", REFUSED),
        (f"`{RESPONSES}`", responses_requests.REFUSED),
        (f"`{MESSAGES}`", messages_requests.REFUSED),
    ):
        parts.append(f"## Refused by {title}\n\n{_refused_table(refused)}")
    return "\n".join(parts)


def _refused_table(refused: Refused) -> str:
    empty = ", ".join(f"`{json.dumps(value)}`" for value in openai_keys.EMPTY)
    lines = [f"Values that ask for nothing pass: {empty}, and those in the second column.", ""]
    lines += ["| key | passes with | otherwise |", "|---|---|---|"]
    for name, (neutral, why) in refused.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral)
        lines.append(f"| `{name}` | {values} | {why} |")
    return "\n".join(lines) + "\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES = {
    "settings.md": settings_page,
    "parameters.md": parameters_page,
    "bodies.md": bodies_page,
    "models.md": models_page,
}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write(), encoding="utf-8")
