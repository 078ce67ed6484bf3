"""Hub ids: what the hub's cache holds is loaded, offline; what it lacks is an error that helps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from driver import GREEDY, Driver, expected
from huggingface_hub import constants

from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import ConfigError, ModelNotFoundError
from nanoengine.loading.find_model import find_model, read_config_of
from nanoengine.loading.hub import UNWANTED, WANTED, fetch_config, hub_folder, is_hub_id
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.modelopt import FILE

NAME, COMMIT = "some-org/Tiny-1.0_b", "0123456789abcdef0123456789abcdef01234567"
Tiny = Callable[[str], Path]


def filled_cache(home: Path, checkpoint: Path) -> Path:
    """HF_HOME with the checkpoint as the client leaves it: links from a snapshot to blobs."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for folder in (snapshot, blobs, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for path in checkpoint.iterdir():
        shutil.copy(path, blobs / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.name}")
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_cached_model_is_loaded(tiny: Tiny, cache: Path) -> None:
    filled_cache(cache, tiny("llama"))
    engine = LLMEngine(NAME, device="cpu", dtype="float32", num_gpu_blocks=2)
    (output,) = Driver(engine).run([[5, 6, 7]])
    assert output.outputs[0].token_ids == expected(tiny("llama"), [5, 6, 7], GREEDY.max_tokens)


def test_the_environment_names_the_cache(tiny: Tiny, tmp_path: Path) -> None:
    """In a process of its own, as the client reads it when it is imported."""
    snapshot = filled_cache(tmp_path, tiny("llama"))
    program = (
        "import sys; from nanoengine.loading.hub import hub_folder; print(hub_folder(sys.argv[1]))"
    )
    cleared = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", program, NAME],
        env=cleared | settings | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == str(snapshot)


def test_a_local_folder_goes_before_the_hub(
    tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = filled_cache(cache, tiny("llama"))
    monkeypatch.chdir(cache)
    assert find_model(NAME, "safetensors") == snapshot
    with pytest.raises(ConfigError, match="is a folder"):
        find_model(NAME, "gguf")
    (cache / NAME).mkdir(parents=True)
    assert find_model(NAME, "auto") == Path(NAME)


def test_only_data_is_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **how: asked.update(how) or str(cache)
    )
    assert hub_folder(NAME) == cache
    assert asked == {"allow_patterns": list(WANTED), "ignore_patterns": list(UNWANTED)}
    files = (
        *("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer.model", "merges.txt"),
        "additional_chat_templates/tool_use.jinja",
        *("pytorch_model.bin", "modeling.py", "x.pt", "x.pkl", "README.md", "x.gguf"),
        *("consolidated.safetensors", "original/params.json", "onnx/model.safetensors"),
    )
    wanted = huggingface_hub.utils.filter_repo_objects(files, **asked)
    assert list(wanted) == list(files[:8])


def test_a_shape_is_read_from_the_cache_or_downloaded_beside_it(
    tiny: Tiny, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str], local_dir: Path) -> str:
        asked.extend(allow_patterns)
        shutil.copy(tiny("llama") / "config.json", local_dir)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    read = read_config_of(NAME)
    assert (read.num_layers, read.rope) == (3, read_model_config(tiny("llama")).rope)
    assert asked == ["config.json", FILE] and not (cache / "hub").exists()
    snapshot = filled_cache(cache, tiny("llama"))
    assert fetch_config(NAME, cache) == snapshot
    assert read_config_of(NAME) == read_model_config(tiny("llama")) and len(asked) == 2


def test_a_shape_that_cannot_be_downloaded_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: it does not try again for 25 s."""
    with monkeypatch.context() as there:
        there.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: None)
        with pytest.raises(ModelNotFoundError, match=r"downloaded \(it has no config\.json\)"):
            read_config_of(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    with pytest.raises(ModelNotFoundError, match=r"cannot be downloaded \(.*ConnectError"):
        read_config_of(NAME)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("offline", [True, False])
def test_an_unknown_model_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    def fail(name: str, **_: Any) -> str:
        raise ConnectionError("no route\nand more")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    what = "HF_HUB_OFFLINE is set" if offline else "check the name and the network"
    with pytest.raises(ModelNotFoundError, match=rf"{cache}/hub .*\(no route\): {what}"):
        hub_folder(NAME)


def test_names_that_are_hub_ids() -> None:
    assert is_hub_id(NAME) and is_hub_id("a/b")
    for name in ("a", "a/b/c", "./a", "/a", "a/", "../b", "~/b", "a b/c", "a/.b"):
        assert not is_hub_id(name)
