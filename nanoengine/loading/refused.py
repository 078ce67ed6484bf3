"""What is said about models that cannot be loaded: what they are, and the nearest that works.

Tables of names; reads no files, but for the base model that an adapter names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanoengine.errors import shown
from nanoengine.loading.modelopt import ALGORITHM
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.text.checked_json import MAX_REASON, has_file, read_json

OTHER_EXPERTS = (
    "take a model such as Qwen/Qwen3-30B-A3B or, smaller, Qwen/Qwen3-4B, or run this one with vLLM "
    "or llama.cpp"
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """pattern: of the names that this is about, in any case. what: they are. instead: what works,
    in which \\1 is the first group of the pattern.
    """

    pattern: str
    what: str
    instead: str


# Classes in config.json's `architectures` and names of architectures in a GGUF; the first match
# counts, so a vision model with experts is called a vision model.
ARCHITECTURES_REFUSED = (
    Refusal(
        r"^(T5|MT5|UMT5|Bart|MBart|Pegasus|Marian|BlenderBot|Whisper|T5Gemma)",
        "an encoder with a decoder, and only decoders are supported",
        "run it with transformers",
    ),
    Refusal(
        r"^Gemma4\w*Assistant",
        "an assistant, which guesses tokens for a Gemma 4",
        "load that model, and give this one as draft_model",
    ),
    Refusal(
        r"ForConditionalGeneration|VL|Vision|Llava|Omni|Audio|Multimodal|Phi4MM|^clip",
        "a model for images, audio or video beside text, and only text models are supported",
        "take a text model such as Qwen/Qwen3-4B or google/gemma-3-1b-it, or run this one with "
        "vLLM",
    ),
    Refusal(
        r"Next|Qwen3_?5|Mamba|Jamba|Zamba|Lfm3|Hybrid|Rwkv|"
        r"RecurrentGemma|MiniMax(?!-?M2)|Plamo2",
        "a model with recurrent or linear attention layers, which are not supported yet",
        "take a model with attention in all layers such as Qwen/Qwen3-4B, or run this one with "
        "vLLM or llama.cpp",
    ),
    Refusal(
        r"MoE|Mixtral|Gpt-?Oss|Deepseek|Llama4|Dbrx|Grok|Arctic",
        "a mixture of experts of a kind that is not supported yet",
        OTHER_EXPERTS,
    ),
    Refusal(
        r"Bert|Electra|ForSequenceClassification|ForMaskedLM|ForTokenClassification|Embedding",
        "a model that generates no text",
        "run it with sentence-transformers or transformers",
    ),
    Refusal(
        r"^Gemma",
        "another Gemma, and only Gemma 1 to 4 are supported",
        "take google/gemma-3-1b-it, or run this one with vLLM or llama.cpp",
    ),
    Refusal(
        r"^Phi(ForCausalLM|2$)",
        "Phi-1 or Phi-2",
        "take microsoft/Phi-4-mini-instruct, or run this one with vLLM or llama.cpp",
    ),
    Refusal(r"", "not supported", "run it with vLLM, transformers or llama.cpp"),
)

# `quant_method` of a quantization_config; one without a method, as of MLX, is "".
QUANTISED = "weights that were quantised in this way are not read"
ORIGINAL = "take the model's 16-bit original"
QUANTIZATIONS_REFUSED = (
    Refusal(
        r"^awq$|^gptq$|^auto-?round|^mxfp4$|^nvfp4$|^modelopt|^hqq$|^aqlm$|^exl[23]$|^vptq$|^$",
        QUANTISED,
        f'{ORIGINAL} with quantization="int8", or a GGUF of it',
    ),
    Refusal(
        r"fp8|compressed",
        QUANTISED,
        f'{ORIGINAL} or one in FP8, with quantization="int8" for weights of 8 bits',
    ),
    Refusal(r"", QUANTISED, f'{ORIGINAL} with quantization="int8"'),
)

# Names of models as other programs and web pages write them.
NAMES_REFUSED = (
    Refusal(
        r"^https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)/?$",
        "this is the page of a model",
        r"give its id, '\1'",
    ),
    Refusal(
        r"^[a-z][a-z0-9+.-]*://",
        "nothing is loaded from a URL",
        "download the file, and give its path here",
    ),
    Refusal(
        r"\.gguf$|^[./~]",
        "",
        "check the path, and the current folder if it does not begin with /",
    ),
    Refusal(
        r"^(?:hf\.co/|huggingface\.co/)?([\w.-]+/[\w.-]+):([\w.-]+)$",
        "this is llama.cpp's and Ollama's name of a file at the hub",
        r'download the file, as with: hf download \1 --include "*\2*.gguf" --local-dir . and give '
        "its path here",
    ),
    Refusal(
        r"^[\w.-]+:[\w.-]+$",
        "this is a tag of Ollama, whose registry is not read",
        "give the model's id at the Hugging Face hub, such as meta-llama/Llama-3.2-1B-Instruct",
    ),
    Refusal(
        r"^([\w.-]+/[\w.-]*GGUF)$",
        "this is a collection of GGUF files at the hub",
        r'download one, as with: hf download \1 --include "*Q4_0.gguf" --local-dir . and give its '
        "path here",
    ),
)


def about_name(name: str) -> str:
    """What a name is under which there is no model, and what to give instead; "" if unknown."""
    return "; ".join(filter(None, _first(NAMES_REFUSED, name)))


def _first(rows: Iterable[Refusal], name: str) -> tuple[str, str]:
    """What `name` is, and what works instead, by the first row that matches."""
    for row in rows:
        if found := re.search(row.pattern, name, re.IGNORECASE):
            return row.what, found.expand(row.instead)
    return "", ""


def families() -> str:
    """Names of the supported models, as users know them, without their sizes and what they have."""
    aside = r" \([^)]*\)| with .*"
    names = [re.sub(aside, "", ARCHITECTURES[each].models) for each in sorted(ARCHITECTURES)]
    return ", ".join(dict.fromkeys(names))


def about_architecture(name: str) -> str:
    """What a refused architecture is, what to take instead, and what is supported."""
    name = name[:MAX_REASON]
    what, instead = _first(ARCHITECTURES_REFUSED, name)
    return f"the architecture {name or '(none)'} is {what}; {instead}. Supported are {families()}"


def quant_method(config: object) -> str:
    """The method that a `quantization_config` names; "" without one, "unknown" for nonsense."""
    method = config.get("quant_method", "") if isinstance(config, dict) else ""
    return method if isinstance(method, str) and len(method) < MAX_REASON else "unknown"


def about_quantization(config: object) -> str:
    """What the weights of a checkpoint with this `quantization_config` are."""
    method = quant_method(config)
    if isinstance(config, dict) and isinstance(config.get(ALGORITHM), str):
        method = f"{method} with {config[ALGORITHM][:MAX_REASON]}"
    what, instead = _first(QUANTIZATIONS_REFUSED, method)
    return f"'quantization_config' says {shown(method or config)}: {what}; {instead}"


def rotates_activations(config: object) -> bool:
    """Whether compressed-tensors multiplies activations by a matrix, as QuIP and SpinQuant have it.
    Weights are stored multiplied.
    """
    transforms = config.get("transform_config") if isinstance(config, dict) else None
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else transforms
    try:
        each = [use["location"] for group in (groups or {}).values() for use in group["apply"]]
    except (AttributeError, KeyError, TypeError):
        return True
    return any(where not in ("weight_input", "weight_output") for where in each)


def about_folder(folder: Path) -> str:
    """For an error about a folder without config.json: what lies there instead."""
    path = folder / "adapter_config.json"
    if has_file(path):
        base = shown(read_json(path).get("base_model_name_or_path"))
        return f"; it is a LoRA adapter of {base}: give that model, and this folder as lora"
    if files := sorted(folder.glob("*.gguf")):
        return f"; give the file itself: {files[0]}"
    if below := sorted(folder.glob("*/config.json")) or sorted(
        folder.glob("snapshots/*/config.json")
    ):
        return f"; give the folder below it: {below[0].parent}"
    return "; a model's folder has config.json, its weights (*.safetensors) and tokenizer.json"


def about_file(path: Path) -> str:
    """For an error about a damaged file of weights: what it is instead, else what to do."""
    with path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "; it is a pointer of Git LFS: run `git lfs pull` in the clone that it is from"
    if start.lstrip()[:1] == b"<":
        return "; it is a web page: download the file that the page is about"
    return "; get the file again"
