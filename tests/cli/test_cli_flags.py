"""Engine flags come from EngineConfig, and from the environment and a YAML file."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from nanoengine.cli.flags import (
    OTHER_VARIABLES,
    PARAMS,
    SETTINGS,
    UNSET,
    engine_config,
    engine_settings,
    sampling_settings,
)
from nanoengine.cli.main import make_parser
from nanoengine.cli.serve import API_KEY
from nanoengine.cli.usage import UsageError
from nanoengine.config.engine import EngineConfig
from nanoengine.sampling_params import SamplingParams

FIELDS = {field.name: field for field in fields(EngineConfig) if field.name != "model"}


def settings(*flags: str, **environ: str) -> dict[str, object]:
    parser, _ = make_parser()
    return engine_settings(parser.parse_args(["run", "m", "p", *flags]), environ)


def test_every_setting_has_a_group_and_a_text() -> None:
    named = [name for group in SETTINGS.values() for name in group]
    assert sorted(named) == sorted(FIELDS)
    assert set(PARAMS) <= {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("command", ["run", "chat", "plan", "batch"])
def test_help_shows_each_flag_with_its_default_and_variable(command: str) -> None:
    text = " ".join(make_parser()[1][command].format_help().split())
    for name, field in FIELDS.items():
        unset = UNSET.get(name, "planned")
        default = re.escape(str(unset if field.default is None else field.default))
        flag, variable = name.replace("_", "-"), f"NANOENGINE_{name.upper()}"
        assert re.search(rf"--{flag}\b.*\[{default}; \${variable}\]", text), name


def test_help_calls_no_setting_planned_that_is_the_models() -> None:
    text = " ".join(make_parser()[1]["serve"].format_help().split())
    assert "folder of another tokenizer [the model's; $NANOENGINE_TOKENIZER]" in text
    assert "auto, vllm [vllm; run and chat: auto; $NANOENGINE_GENERATION_CONFIG]" in text
    assert "most tokens of a request, prompt and output [planned; $" in text


def test_help_shows_defaults_of_sampling_parameters_that_are_theirs() -> None:
    """A setting that is None is planned, off, or of the model; a parameter is not."""
    text = " ".join(make_parser()[1]["run"].format_help().split())
    sampling = text[text.index("sampling:") : text.index("model and device:")]
    assert "may be given again [none] --ignore-eos" in sampling
    assert "most tokens of the answer [512] --min-tokens" in sampling
    assert "planned" not in sampling


def test_flags_give_values_of_the_fields_types() -> None:
    given = settings("--ring-slots", "3", "--kv-cache-gib", "1.5", "--dtype", "float32")
    assert given == {"ring_slots": 3, "kv_cache_gib": 1.5, "dtype": "float32"}
    assert settings("--no-enable-prefix-caching", "--debug-kv") == {
        "enable_prefix_caching": False,
        "debug_kv": True,
    }
    assert settings() == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [("32K", 32768), ("32k", 32000), ("0.5K", 512), ("25.6k", 25600), ("1M", 1 << 20), ("2m", 2e6)],
)
def test_integers_may_have_units_as_in_vllm(tmp_path: Path, text: str, value: int) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"max_model_len: {text}")
    expected = {"max_model_len": value}
    assert settings("--max-model-len", text) == expected
    assert settings(NANOENGINE_MAX_MODEL_LEN=text) == settings("--config", str(path)) == expected


@pytest.mark.parametrize("text", ["0.3K", "K", "1.5", "1KK", "1 K", "-1K", "1e3", ""])
def test_other_numbers_are_no_integers(text: str) -> None:
    with pytest.raises(UsageError, match="NANOENGINE_MAX_MODEL_LEN must be an integer, got"):
        settings(NANOENGINE_MAX_MODEL_LEN=text)


def test_every_setting_can_come_from_the_environment() -> None:
    for name, field in FIELDS.items():
        kind = str(field.type).partition(" ")[0]
        text = {"bool": "1", "int": "5", "float": "0.5", "str": "x"}[kind]
        value = {"bool": True, "int": 5, "float": 0.5, "str": "x"}[kind]
        assert settings(**{f"NANOENGINE_{name.upper()}": text}) == {name: value}
    assert settings(NANOENGINE_DEBUG_KV="off") == {"debug_kv": False}


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("ring_slots: 2\nslot_tokens: 2\nkv_cache_gib: 2\n")
    environ = {"NANOENGINE_RING_SLOTS": "3", "NANOENGINE_SLOT_TOKENS": "3"}
    given = settings("--config", str(path), "--ring-slots", "4", **environ)
    assert given == {"ring_slots": 4, "slot_tokens": 3, "kv_cache_gib": 2}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ring_slot: 2", "unknown setting 'ring_slot'; did you mean 'ring_slots'?"),
        ("model: x", "the model is named on the command line; leave 'model' out"),
        ("- a", "must hold settings"),
        ("a: [", "cannot be read"),
        ("1: 2", "the name of a setting is a string"),
        ("? [a]\n: b", "cannot be read"),
        ("seed: 2020-13-41", "cannot be read"),
        ("[" * 3000, "cannot be read"),
    ],
)
def test_a_bad_file_is_an_error_of_use(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(UsageError, match=re.escape(text)):
        settings("--config", str(path))


def test_a_file_may_say_what_yaml_reads_as_something_else(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-model-len: 64\nspeculative: off\nkv_cache_gib: 1e-2\ndebug-kv: off\n")
    found = {"max_model_len": 64, "speculative": "off", "kv_cache_gib": 0.01, "debug_kv": False}
    assert settings("--config", str(path)) == found
    path.write_text("seed: 1\nkv-cache-gib: 2\nkv_cache_gib: 3\n")
    with pytest.raises(UsageError, match="with _ and with -; leave one of them out"):
        settings("--config", str(path))


def test_none_as_text_is_left_out() -> None:
    args = make_parser()[0].parse_args(["plan", "m", "--quantization", "None"])
    with pytest.raises(UsageError, match=r"got 'None'; leave it out for None$"):
        engine_config(args, {})


def test_an_empty_file_gives_nothing_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.touch()
    assert settings("--config", str(path)) == {}
    with pytest.raises(UsageError, match="cannot be read"):
        settings("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("RING_SLOTS", "x", "NANOENGINE_RING_SLOTS must be an integer, got 'x'"),
        ("KV_CACHE_GIB", "x", "NANOENGINE_KV_CACHE_GIB must be a number, got 'x'"),
        ("DEBUG_KV", "maybe", "NANOENGINE_DEBUG_KV must be 1 or 0, got 'maybe'"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        settings(**{f"NANOENGINE_{name}": value})


def test_a_misspelt_variable_is_named() -> None:
    said = "NANOENGINE_MAX_MODEL_LENN; did you mean NANOENGINE_MAX_MODEL_LEN? If"
    with pytest.raises(UsageError, match=re.escape(said)):
        settings(NANOENGINE_MAX_MODEL_LENN="5")
    others = {"NANOENGINE_SERVICE_HOST": "10.0.0.1", "NANOENGINE_PORT": "tcp://10.0.0.1:80"}
    assert settings(MAX_MODEL_LENN="5", **others) == {}  # Kubernetes', of a service of this name
    assert settings(NANOENGINE_MODELS="x", NANOENGINE_MODEL="y") == {}  # the model is no setting


def test_variables_that_are_no_settings_are_known() -> None:
    package = Path(__file__).parents[2] / "nanoengine"
    sources = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    named = {name.lower() for name in re.findall(r'"NANOENGINE_([A-Z_]+)"', sources)}
    assert named | {API_KEY.removeprefix("NANOENGINE_").lower()} == set(OTHER_VARIABLES)


def test_values_are_checked_by_the_dataclasses() -> None:
    parser, _ = make_parser()
    with pytest.raises(UsageError, match="kv_offload_gib needs enable_cpu_offload=True"):
        flags = ["--kv-offload-gib", "1", "--no-enable-cpu-offload"]
        engine_config(parser.parse_args(["chat", "m", *flags]), {})
    config = engine_config(parser.parse_args(["chat", "m", "--kv-offload-gib", "1"]), {})
    assert config.enable_cpu_offload is True
    with pytest.raises(UsageError, match="temperature must be between"):
        sampling_settings(parser.parse_args(["chat", "m", "--temperature", "-1"]))


def test_sampling_flags_are_the_fields_of_a_request() -> None:
    parser, _ = make_parser()
    args = parser.parse_args(["chat", "m", "--top-k", "4", "--stop", "a", "--stop", "b"])
    assert sampling_settings(args) == {"max_tokens": 512, "top_k": 4, "stop": ["a", "b"]}
    assert "top_k" not in settings("--top-k", "4")


@pytest.mark.parametrize(
    "flags",
    [
        "--enable-chunked-prefill --dtype float32",
        "--kv-cache-dtype auto --dtype float32 --trust-remote-code",
        "--tokenizer-mode=auto --no-trust-remote-code --dtype float32",
        "--dtype float32 --pipeline-parallel-size 1 --async-scheduling --task generate",
        "--enable-auto-tool-choice --dtype=float32",
    ],
)
def test_flags_that_ask_for_what_is_done_are_left_out(flags: str) -> None:
    """vLLM's, wherever they stand; values of others stay."""
    parser, _ = make_parser()
    for given in (["serve", "m", *flags.split()], ["serve", *flags.split(), "m"]):
        args = parser.parse_args(given)
        assert (args.model, args.dtype) == ("m", "float32")
