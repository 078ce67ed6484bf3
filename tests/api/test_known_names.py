"""Names of other engines: each says what it is here, and a near name is offered only when near."""

from __future__ import annotations

import argparse
import copy
import inspect
import pickle
import pydoc
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from nanoengine import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from nanoengine.config.engine import NAMES, EngineConfig, Settings, make_config
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError, InvalidParamsError, InvalidPromptError, near_name
from nanoengine.serving.options import ServerOptions
from nanoengine.text.known_methods import METHODS, OF_TOKENIZERS
from nanoengine.text.known_names import (
    CHANGED,
    FLAG,
    KNOWN,
    MISSING,
    PARAMETER,
    RENAMED,
    ROWS,
    SETTING,
    WORKS,
    KnownName,
    read_table,
    translated,
)
from nanoengine.text.tokenizer import Tokenizer


def params_of(given: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**given)


SETTINGS = {field.name for field in fields(EngineConfig)}
PARAMS = {field.name for field in fields(SamplingParams)}
FLAGS = SETTINGS | {field.name for field in fields(ServerOptions)}
FIELDS = {SETTING: SETTINGS, PARAMETER: PARAMS, FLAG: FLAGS}
ENGINES = {
    *("vLLM", "FastDeploy", "LMDeploy", "nano-vllm", "SGLang", "transformers", "llama.cpp"),
    *("Ollama", "OpenAI"),
}
# Names that look like one of ours and are another thing; their rows say so.
LOOK_ALIKES = {
    *("num_cpu_blocks", "devices", "dbo_prefill_token_threshold", "prompt_logprob_start", "top_h"),
    *("long_prefill_token_threshold_adaptive", "allowed_origins"),
}
TYPOS = {
    "max_modell_len": "max_model_len",
    "max_model_length": "max_model_len",
    "gpu_memory_utilisation": "gpu_memory_utilization",
    "gpu_mem_utilization": "gpu_memory_utilization",
    "kvcache_blocksize": "kvcache_block_size",
    "kv_offload_gb": "kv_offload_gib",
    "enable_cpu_ofload": "enable_cpu_offload",
    "enable_prefix_cache": "enable_prefix_caching",
    "enforce_eagre": "enforce_eager",
    "max_num_seq": "max_num_seqs",
    "ring_slot": "ring_slots",
    "num_thread": "num_threads",
    "quantisation": "quantization",
    "sed": "seed",
    "temprature": "temperature",
    "temp": None,
    "maxtokens": "max_tokens",
    "max_token": "max_tokens",
    "top-p": "top_p",
    "repetiton_penalty": "repetition_penalty",
    "stop_tokens_ids": "stop_token_ids",
    "ignore_eso": "ignore_eos",
    "banana": None,
    "offload": None,
    "cache": None,
}


def test_the_table_agrees_with_settings_and_parameters() -> None:
    assert len(KNOWN) == len(ROWS)
    for row in ROWS:
        ours = FIELDS.get(row.scope, set())
        assert (row.name in ours) == (row.kind == WORKS), row
        assert (row.here in ours) == (row.kind in (WORKS, RENAMED)), row
        assert bool(row.sentence) == (row.kind != WORKS), row
        assert row.engines and set(row.engines) <= ENGINES, row
        assert len(row.sentence) < 200 and row.sentence.isprintable(), row
        assert not row.sentence.endswith("."), row
    of_vllm = {row.name for row in ROWS if "vLLM" in row.engines and row.kind == WORKS}
    assert of_vllm >= PARAMS
    assert {row.kind for row in ROWS} == {WORKS, RENAMED, CHANGED, MISSING}


@pytest.mark.parametrize(
    ("owner", "known"), [(LLM, METHODS), (AsyncLLM, METHODS), (Tokenizer, OF_TOKENIZERS)]
)
def test_a_method_of_another_engine_says_what_it_is_here(
    owner: type[Any], known: dict[str, KnownName]
) -> None:
    made = owner.__new__(owner)  # no model is loaded for this
    for name, row in known.items():
        assert not hasattr(owner, name), name
        assert set(row.engines) <= ENGINES and len(row.sentence) < 200, row
        with pytest.raises(AttributeError, match=re.escape(row.sentence)) as found:
            getattr(made, name)
        assert str(found.value).startswith(f"{owner.__name__!r} object has no attribute {name!r}; ")
    with pytest.raises(AttributeError, match=r"'generat'$") as found:
        made.generat  # noqa: B018
    assert (found.value.name, found.value.obj) == ("generat", made)


def test_what_a_tokenizer_says_is_there_is_there(tiny: Callable[[str], Path]) -> None:
    made = Tokenizer.from_folder(tiny("qwen3"))
    for row in OF_TOKENIZERS.values():
        if row.sentence.startswith("here it is ") and "nothing" not in row.sentence:
            said = (
                row.sentence.removeprefix("here it is ")
                .removeprefix("in ")
                .removeprefix("backend.")
            )
            name = re.split(r"\W", said)[0]
            assert any(hasattr(each, name) for each in (made, made.backend)) or name == "plan", row


def test_a_group_that_cannot_be_read_is_an_error() -> None:
    (row,) = read_table(SETTING, "missing unless (0, 'a'): a\nb\n  X: y\n")
    assert (row.sentence, row.asks_nothing("a"), row.asks_nothing("b")) == ("a b", True, False)
    with pytest.raises(ValueError, match="no group begins with 'broken: x"):
        list(read_table(SETTING, "broken: x\n  X: y\n"))


def test_a_near_name_is_offered_only_when_it_is_near() -> None:
    for row in ROWS:
        ours = FIELDS.get(row.scope)
        if ours and row.kind != WORKS and row.name not in LOOK_ALIKES:
            assert near_name(row.name, ours) in (None, row.here), row.name
    for typed, meant in TYPOS.items():
        assert near_name(typed, SETTINGS | PARAMS) == meant, typed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("enable_lora", "unknown setting 'enable_lora'; one LoRA adapter is added to the weights"),
        ("use_tqdm", r"belongs to generate\(\) and chat\(\): use_tqdm=False there"),
        ("hf_token", "HF_TOKEN"),
        ("download_dir", "HF_HUB_CACHE"),
        ("n_ctx", "here it is max_model_len"),
        ("n_gpu_layers", "layers do not split"),
        ("revision", "hf download MODEL --revision"),
        ("cpu_offload_gb", "weights"),
        ("pipeline_parallel_size", "tensor_parallel_size is the only way"),
        ("max_tokens", r"SamplingParams\(max_tokens=...\)"),
        ("max_new_tokens", r"SamplingParams\(max_tokens=...\)"),
        ("num_beams", r"llm.beam_search\("),
        ("tools", r"chat\(messages, tools="),
    ],
)
def test_a_setting_of_another_engine_has_its_own_sentence(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_config("m", {name: 3})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "max_new_tokens",
            "unknown parameter 'max_new_tokens' of SamplingParams; here it is max_tokens",
        ),
        ("do_sample", "temperature=0"),
        ("num_beams", r"llm.beam_search\("),
        ("repeat_penalty", "here it is repetition_penalty"),
        ("best_of", "cumulative_logprob"),
        ("n_predict", "here it is max_tokens"),
        ("stream_interval", r"generate\(\) returns whole texts"),  # a setting has another sentence
        ("guided_json", 'here it is structured_outputs={"json": schema}'),
        ("ebnf", 'here it is structured_outputs={"grammar": text}'),
        ("max_model_len", r"LLM\(model, max_model_len=...\)"),
        ("session_len", r"LLM\(model, max_model_len=...\)"),
        ("temprature", "did you mean 'temperature'"),
        ("banana", "'banana' of SamplingParams$"),
    ],
)
def test_a_parameter_of_another_engine_has_its_own_sentence(name: str, text: str) -> None:
    with pytest.raises(InvalidParamsError, match=text):
        SamplingParams(**{name: 3})
    with pytest.raises(InvalidParamsError, match=text):
        replace(SamplingParams(), **{name: 3})


@pytest.mark.parametrize(
    ("made", "name", "taken", "refused"),
    [
        (partial(make_config, "m"), "trust_remote_code", (None, False, True), (0, "")),
        (partial(make_config, "m"), "enable_lora", (None, False), (True,)),
        (partial(make_config, "m"), "enable_chunked_prefill", (None, True), (False, 1)),
        (partial(make_config, "m"), "kv_cache_dtype", (None, "auto"), ("fp8", False)),
        (partial(make_config, "m"), "cpu_offload_gb", (None, 0, 0.0), (4, False)),
        (partial(make_config, "m"), "n_gpu_layers", (None, -1), (0, 20)),
        (partial(make_config, "m"), "disable_radix_cache", (None,), (False, True)),
        (partial(make_config, "m"), "swap_spice", (), (None, False)),
        (params_of, "do_sample", (None, True), (False,)),
        (params_of, "use_beam_search", (None, False), (True,)),
        (params_of, "max_new_tokens", (None,), (False, 5)),
    ],
)
def test_a_name_may_ask_for_what_is_done_anyway(
    made: Callable[[dict[str, Any]], object],
    name: str,
    taken: tuple[object, ...],
    refused: tuple[object, ...],
) -> None:
    for value in taken:
        assert made({name: value}) == made({})
    for value in refused:
        with pytest.raises((ConfigError, InvalidParamsError), match=name):
            made({name: value})


@pytest.mark.parametrize("name", [f.name for f in fields(EngineConfig) if f.name != "model"])
def test_a_setting_that_is_none_is_left_out(name: str) -> None:
    """As scripts pass arguments on that nobody gave."""
    made: Any = make_config("m", {name: None})
    assert made == EngineConfig("m", **({name: None} if getattr(made, name) is None else {}))


def test_a_chat_may_ask_for_what_is_done_anyway(tiny: Callable[[str], Path]) -> None:
    """vLLM's own names and defaults. The answer is that of a call without them."""
    params = SamplingParams(temperature=0, max_tokens=4)
    talk = [{"role": "user", "content": "Hi"}]
    more: dict[str, Any] = {"continue_final_message": False, "chat_template": None}
    more["chat_template_content_format"] = "auto"
    settings: Any = {"dtype": "float32", "num_gpu_blocks": 8, "trust_remote_code": False}
    with LLM(str(tiny("qwen3")), num_threads=1, **settings) as llm:
        texts = [
            llm.chat(talk, params, use_tqdm=False, **each)[0].outputs[0].text for each in ({}, more)
        ]
        assert texts[0] == texts[1] != ""
        for name in ("chat_template", "enable_thinking"):
            with pytest.raises(InvalidParamsError, match=f"{name}' of chat"):
                llm.chat(talk, params, **{name: True})
        with pytest.raises(InvalidParamsError, match="chat_template_kwargs"):
            llm.chat(talk, params, enable_thinking=False)  # type: ignore[call-arg]


def test_parameters_stay_a_plain_dataclass() -> None:
    params = SamplingParams(max_tokens=5)
    assert replace(params, n=2).max_tokens == 5
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert list(inspect.signature(SamplingParams).parameters) == [
        field.name for field in fields(SamplingParams)
    ]
    text = pydoc.render_doc(SamplingParams, renderer=pydoc.plaintext)
    assert "max_tokens: 'int | None' = 16" in text
    with pytest.raises(InvalidParamsError, match=r"'beam_with' .*; did you mean 'beam_width'"):
        BeamSearchParams(beam_with=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="beam_width"):
        BeamSearchParams()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("method", "name", "text"),
    [
        ("generate", "max_tokens", r"'max_tokens' of generate\(\); .*SamplingParams\(max_tokens="),
        ("generate", "max_new_tokens", r"SamplingParams\(max_tokens="),
        ("generate", "num_beams", r"llm.beam_search\("),
        ("generate", "sampling_param", "did you mean 'sampling_params'"),
        ("generate", "tools", r"'tools' of generate\(\); tools are arguments of chat\("),
        ("chat", "stream_options", r"llm.stream_chat\("),
        ("stream", "stream", r"llm.stream\("),
        ("generate", "tokenization_kwargs", "a prompt is encoded whole, and never cut"),
        ("generate", "prompt_text", r'give both in the prompt: {"prompt_token_ids"'),
        ("stream_chat", "max_model_len", r"LLM\(model, max_model_len"),
    ],
)
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_an_argument_of_another_engine_has_its_own_sentence(
    kind: type, method: str, name: str, text: str
) -> None:
    made = object.__new__(kind)  # refused before anything of it is used
    function = getattr(made, method, None)
    if function is not None:
        with pytest.raises(InvalidParamsError, match=text):
            function("Hi", **{name: 1})


def test_an_llm_that_is_called_says_what_to_write() -> None:
    with pytest.raises(InvalidPromptError, match=r"write llm.generate\(prompt, SamplingParams"):
        object.__new__(LLM)("Hi", max_new_tokens=5)


def test_settings_are_the_fields_of_the_config() -> None:
    types = {f.name: str(f.type) for f in fields(EngineConfig) if f.name != "model"}
    given = {name: str(kind) for name, kind in Settings.__annotations__.items()}
    assert given.keys() == types.keys() == get_type_hints(Settings).keys()
    paths = {"tokenizer", "chat_template", "draft_model", "lora", "prefix_cache_file"}
    wider = paths | {"dtype", "device"}
    for name, kind in types.items():
        assert name in wider or f"'{kind}'" in given[name], name


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, LLMEngine])
def test_help_shows_every_setting(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert list(parameters) == [f.name for f in fields(EngineConfig)]
    assert all(parameters[f.name].default == f.default for f in fields(EngineConfig)[1:])
    text = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    assert "kv_offload_gib: 'float | None' = None" in text
    assert "**settings: 'Unpack" not in text


@dataclass
class EngineArgs:
    """As vLLM's: every argument has a default."""

    model: str = "facebook/opt-125m"
    max_model_len: int | None = None
    block_size: int = 16
    swap_space: float = 4
    enable_lora: bool = False
    pipeline_parallel_size: int = 1
    quantization: str | None = None
    compilation_config: dict[str, Any] = field(default_factory=dict)
    _hidden: int = 3


def test_arguments_of_other_engines_become_settings() -> None:
    args = EngineArgs("m", max_model_len=64, _hidden=4)
    assert translated(args, NAMES) == {"model": "m", "max_model_len": 64}
    assert translated(EngineArgs("m", block_size=32), NAMES) == {
        "model": "m",
        "kvcache_block_size": 32,
    }
    assert translated(EngineArgs(), NAMES) == {"model": EngineArgs.model}
    given = {
        "model_path": "m",
        "session_len": 64,
        "tp": 1,
        "enable_chunked_prefill": True,
        "kv_cache_dtype": "auto",
        "hf_token": None,
        "trust_remote_code": False,
        "enable_log_requests": False,
    }
    wanted = {"model": "m", "max_model_len": 64, "tensor_parallel_size": 1}
    assert translated(given, NAMES) == translated(argparse.Namespace(**given), NAMES) == wanted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": "m", "enable_lora": True}, "'enable_lora'; one LoRA adapter is added"),
        ({"model": "m", "enable_chunked_prefill": False}, "unknown setting 'enable_chunked_pref"),
        (EngineArgs("m", pipeline_parallel_size=2), "tensor_parallel_size is the only way"),
        (EngineArgs("m", compilation_config={"level": 3}), "'compilation_config'; PyTorch"),
        ({"model": "m", "kv_cache_memory_bytes": 1 << 30}, "here it is kv_cache_gib, in GiB"),
        ({"model": "m", "max_model_len": 8, "session_len": 9}, "max_model_len is given twice"),
        ({"model": "m", "max_modell_len": 8}, "did you mean 'max_model_len'"),
        ({"max_model_len": 8}, "name no model"),
        (
            {"model": "m", "max_loras": 2, "port": 1},
            "'max_loras'(.|\n)*'port'; .* `nanoengine serve`",
        ),
        (5, "a mapping or an object, got 5"),
    ],
)
def test_arguments_that_are_not_here_are_refused_together(given: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        translated(given, NAMES)


def test_from_engine_args_makes_an_engine(
    tiny: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "nanoengine")
    given = {"model": str(tiny("llama")), "session_len": 48, "num_gpu_blocks_override": 4}
    given |= {"block_size": 16, "device": "cpu", "dtype": "float32"}
    with LLM.from_engine_args(given) as llm:
        assert llm.llm_engine.config.max_model_len == 48
        assert llm.llm_engine.config.num_gpu_blocks == 4
        assert ("nanoengine.api.llm", 20, str(llm.plan)) in caplog.record_tuples
    with pytest.raises(ConfigError, match="LoRA"):
        AsyncLLM.from_engine_args(given | {"enable_lora": True})
    AsyncLLM.from_engine_args(given).close()


@pytest.mark.parametrize(
    "name", ["EngineArgs", "LLMEngine", "TokensPrompt", "GuidedDecodingParams"]
)
def test_an_import_of_vllms_says_what_to_write(name: str) -> None:
    with pytest.raises(ImportError, match=f"no {name}; here it is "):
        exec(f"from nanoengine import {name}")
    with pytest.raises(ImportError, match="cannot import name 'Engin'"):
        exec("from nanoengine import Engin")
