"""Flags from dataclass fields: the engine's settings and the parameters of a request.

A setting is looked up in this order: flag, environment variable (NANOENGINE_<FIELD>), the file of
--config, the dataclass's default. Knows what a field is about (SETTINGS); types and defaults are
the dataclass's own, and it checks the values.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import Field, fields
from typing import Any

from nanoengine.cli.usage import UsageError
from nanoengine.config.engine import CHOICES, NAMES, EngineConfig, make_config
from nanoengine.errors import ConfigError, InvalidParamsError, OutOfMemoryError, near_name, shown
from nanoengine.loading.generation_config import SAMPLING_KEYS
from nanoengine.sampling_params import SamplingParams
from nanoengine.text.known_names import SETTING, unknown_name
from nanoengine.text.numbers import whole_number

PREFIX = "NANOENGINE_"
OTHER_VARIABLES = ("log_level", "traceback", "cache_gib", "api_key")  # that are no settings
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
MAX_TOKENS = 512  # of an answer: SamplingParams' 16 are too few to read, and no limit may never end
OWN_DEFAULTS = {"max_tokens": MAX_TOKENS, "stop": "none"}
# What None is, of settings that are not planned at start-up.
UNSET = {
    "tokenizer": "the model's",
    "chat_template": "the model's",
    "quantization": "as stored",
    "activation_dtype": "off",
    "lora": "none",
    "prefix_cache_file": "none",
    "draft_model": "none",
    "kv_offload_dtype": "that of dtype",
    "enable_cpu_offload": "off",
    "speculative": "planned or off",
    "generation_config": "vllm; run and chat: auto",
}
# In a terminal, where a model names none of them: llama.cpp's. At SamplingParams' own, which choose
# among all tokens, a small model answers nonsense.
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# Group -> field -> what it is, with its unit.
SETTINGS = {
    "model and device": {
        "tokenizer": "folder of another tokenizer",
        "chat_template": "another chat template: a file of Jinja code, or the code",
        "dtype": "of weights and KV: auto, float32, bfloat16 or float16",
        "device": "where the model runs: auto, cpu, cuda, cuda:N, xpu or npu",
        "quantization": "weights in fewer bits",
        "activation_dtype": "8-bit activations beside quantised weights (lossy, CPU)",
        "lora": "folder of a LoRA adapter, which is added to the weights",
        "load_format": "how weights are stored (dummy: random ones)",
        "attention_backend": "kernels of attention",
        "num_threads": "CPU threads",
        "enforce_eager": "no CUDA graphs",
        "tensor_parallel_size": "processes that share the model, on GPUs one for each",
    },
    "memory and length": {
        "max_model_len": "most tokens of a request, prompt and output",
        "gpu_memory_utilization": "share of GPU memory that is used, 0 to 1",
        "kv_cache_gib": "device memory for KV, GiB (unset: on a CPU 4 at most)",
        "num_gpu_blocks": "device memory for KV, blocks",
        "kvcache_block_size": "tokens of a KV block",
        "enable_prefix_caching": "reuse the KV of equal prefixes",
        "prefix_cache_file": "file that keeps them from one run to the next",
    },
    "KV offload": {
        "enable_cpu_offload": "keep KV that does not fit the device in RAM; a size turns it on",
        "kv_offload_gib": "RAM for KV, GiB (unset: 4 at most)",
        "offload_mode": "how KV in RAM is read",
        "kv_offload_dtype": "KV in RAM: bf12 crosses the link in 12 bits, int8 is lossy",
        "ring_slots": "buffers that KV streams through",
        "slot_tokens": "tokens of a layer that a buffer holds",
        "stream_mib_per_step": "KV streamed beside other requests, MiB per step",
        "measure_speed": "measure decode steps at start-up, about a second",
    },
    "scheduling": {
        "max_num_seqs": "most requests at once",
        "max_num_batched_tokens": "most tokens computed in a step",
        "max_num_partial_prefills": "most prompts partly computed",
        "max_long_partial_prefills": "most long ones among them",
        "long_prefill_token_threshold": "tokens above which a prompt is long",
        "decode_reserve_blocks": "KV blocks kept free for running requests",
        "speculative": "off, auto, ngram:K, resident:K, mtp:K, draft:K, or ngram:K and another "
        "with a +: K guesses a step",
        "draft_model": "a smaller model of the same family, which guesses for it",
    },
    "sampling and debugging": {
        "seed": "of requests that give none",
        "generation_config": "parameters of requests without any (auto: the model's own)",
        "debug_kv": "check every access to KV (slow)",
        "debug_copy_delay_ms": "longest random delay of a copy, ms",
    },
}
PARAMS = {
    "temperature": "0: always the likeliest token",
    "top_k": "keep the k likeliest tokens; 0: all",
    "top_p": "keep the likeliest tokens that reach this probability",
    "min_p": "drop tokens less likely than this share of the likeliest",
    "max_tokens": "most tokens of the answer",
    "min_tokens": "fewest tokens of the answer",
    "stop": "end the answer before this text; may be given again",
    "ignore_eos": "go on past the model's end",
    "repetition_penalty": "above 1: fewer repeated tokens",
    "presence_penalty": "-2 to 2, subtracted once for a token in the output",
    "frequency_penalty": "-2 to 2, subtracted for each occurrence",
}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of EngineConfig but `model`, in groups, and --config."""
    parser.add_argument("--config", metavar="FILE.yaml", help="settings by their names, as YAML")
    known = {field.name: field for field in fields(EngineConfig)}
    for title, group in SETTINGS.items():
        target = parser.add_argument_group(title)
        for name, text in group.items():
            values = f": {', '.join(CHOICES[name])}" if name in CHOICES else ""
            text += f"{values} [{_default(known[name])}; ${PREFIX}{name.upper()}]"
            add_flag(target, known[name], text)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each parameter of a request in PARAMS."""
    target = parser.add_argument_group("sampling")
    known = {field.name: field for field in fields(SamplingParams)}
    for name, text in PARAMS.items():
        default = OWN_DEFAULTS.get(name, known[name].default)
        if name in SAMPLING_KEYS:
            default = f"the model's, else {SAMPLED.get(name, default)}"
        add_flag(target, known[name], f"{text} [{default}]")


def add_flag(target: Any, field: Field[Any], text: str) -> None:
    """Add --some-field; without the flag, the parsed arguments lack the field."""
    options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
    kind = str(field.type)
    if kind.startswith("bool"):
        options["action"] = argparse.BooleanOptionalAction
    elif field.name == "stop" or kind.startswith("tuple"):
        options |= {"action": "append", "metavar": "TEXT"}
    else:
        options |= {"type": _type_of(kind), "metavar": kind.partition(" ")[0].upper()}
    target.add_argument(f"--{field.name.replace('_', '-')}", help=text, **options)


def _type_of(kind: str) -> Callable[[str], Any]:
    found = kind.partition(" ")[0]
    return whole_number if found == "int" else float if found == "float" else str


def _default(field: Field[Any]) -> str:
    return UNSET.get(field.name, "planned") if field.default is None else str(field.default)


def engine_config(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> EngineConfig:
    """The EngineConfig of flags, environment and file. Raises UsageError for a bad value."""
    try:
        return make_config(args.model, engine_settings(args, environ))
    except OutOfMemoryError:
        raise
    except ConfigError as error:
        raise UsageError(str(error)) from error


def engine_settings(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The settings that were given, by name. Raises UsageError for one that is unreadable."""
    settings = {} if args.config is None else read_settings(args.config)
    for field in fields(EngineConfig):
        variable = PREFIX + field.name.upper()
        if field.name == "model":
            continue
        if variable in environ:
            settings[field.name] = _from_text(variable, environ[variable], str(field.type))
        if hasattr(args, field.name):
            settings[field.name] = getattr(args, field.name)
    _check_variables(environ)
    return settings


def _check_variables(environ: Mapping[str, str]) -> None:
    """Raises UsageError for a variable that seems to be a misspelt setting. Others with our prefix
    may be another program's.
    """
    known = {*NAMES, *OTHER_VARIABLES} - {"model"}
    for variable in environ:
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in known:
            continue
        if near := near_name(name, known):
            raise UsageError(
                f"unknown environment variable {variable}; did you mean {PREFIX}{near.upper()}? "
                "If it is meant for another program, unset it here"
            )


def _from_text(variable: str, text: str, kind: str) -> Any:
    """The value of an environment variable as its field's type."""
    if kind.startswith("bool"):
        if text.lower() in (*TRUE, *FALSE):
            return text.lower() in TRUE
        raise UsageError(f"{variable} must be 1 or 0, got {shown(text)}")
    try:
        return _type_of(kind)(text)
    except ValueError as error:
        what = "an integer" if kind.startswith("int") else "a number"
        raise UsageError(f"{variable} must be {what}, got {shown(text)}") from error


def read_settings(path: str) -> dict[str, Any]:
    """The settings in a YAML file, spelled as settings or as flags. Raises UsageError if it holds
    anything else.
    """
    import yaml  # a dependency of huggingface_hub, which is one of ours

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except (OSError, RecursionError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path} cannot be read: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} must hold settings as `name: value`")
    if "model" in content:
        raise UsageError(
            f"--config {path}: the model is named on the command line; leave 'model' out"
        )
    named = {name.replace("-", "_") if isinstance(name, str) else name: name for name in content}
    if len(named) < len(content):
        raise UsageError(
            f"--config {path} gives a setting with _ and with -; leave one of them out"
        )
    known = NAMES - {"model"}
    for name in named.keys() - known:
        raise UsageError(f"--config {path}: {unknown_name(SETTING, named[name], known)}")
    kinds = {field.name: str(field.type) for field in fields(EngineConfig)}
    return {name: _from_yaml(content[given], name, kinds[name]) for name, given in named.items()}


def _from_yaml(value: Any, name: str, kind: str) -> Any:
    """The value as its field's type, where YAML 1.1 reads another: a bare `off` is False, and 1e-2,
    without a point, is text, as is 32K.
    """
    if value is False and name == "speculative":
        return "off"
    if isinstance(value, str) and kind.startswith(("int", "float")):
        with suppress(ValueError):
            return _type_of(kind)(value)
    return value


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The parameters of a request that were given, and max_tokens. Raises UsageError for one that
    is out of range.
    """
    given = {name: getattr(args, name) for name in PARAMS if hasattr(args, name)}
    settings = {"max_tokens": MAX_TOKENS} | given
    try:
        SamplingParams(**settings)
    except InvalidParamsError as error:
        raise UsageError(str(error)) from error
    return settings
