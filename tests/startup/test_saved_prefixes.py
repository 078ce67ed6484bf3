"""The prefix cache in a file: a later engine finds KV there, with the bits that were computed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_reference
from driver import Driver, assert_all_free, small_engine
from marks import needs_no_gpu
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanoengine import LLM, SamplingParams
from nanoengine.config.engine import EngineConfig
from nanoengine.errors import ConfigError
from nanoengine.startup.prefix_file import ABOUT, OLD_S

Tiny = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [(7 * i) % 256 for i in range(60)]  # seven full blocks of 8, and one with GREEDY
OTHER = [(11 * i + 3) % 256 for i in range(40)]


def run(model: Path, prompts: list[list[int]], file: Path | None, **settings: Any) -> list[Any]:
    """Cached tokens, ids and logits of each prompt, one after another in a new engine."""
    saved = {} if file is None else {"prefix_cache_file": str(file)}
    engine = small_engine(model, **saved, **settings)
    driver, found = Driver(engine), []
    for prompt in prompts:
        (output,) = driver.run([prompt], [GREEDY])
        assert output.error is None, output.error
        logits = torch.stack(driver.logits[output.request_id])
        found.append((output.num_cached_tokens, output.outputs[0].token_ids, logits))
    engine.kv.check()
    engine.close()
    return found


def assert_found(again: list[Any], cold: list[Any], counts: list[int]) -> None:
    assert [cached for cached, *_ in again] == counts
    for (_, ids, logits), (_, right, wanted) in zip(again, cold, strict=True):
        assert ids == right and torch.equal(logits, wanted)


MODELS = ("llama", "mistral-window", "gemma3", "gemma4-shared", "deepseek-v3", "qwen3-moe", "phi3")
RECURRENT = ("qwen3.5", "granite-hybrid", "nemotron-h", "falcon-h1", "kimi-linear", "lfm2")
TIERS: dict[str, dict[str, Any]] = {
    "resident": {},
    "in place": {"num_gpu_blocks": 4, "kv_offload_gib": 0.01, "offload_mode": "in_place"},
    "streamed": {"num_gpu_blocks": 4, "kv_offload_gib": 0.01, "offload_mode": "stream"},
}


@pytest.mark.some(10)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", MODELS + RECURRENT)
def test_a_later_engine_finds_what_the_same_one_would(
    tiny: Tiny, tmp_path: Path, name: str, tier: str
) -> None:
    model, file = tiny(name), tmp_path / "kv"
    settings = {} if "window" in name or "gemma" in name else TIERS[tier]
    warm = run(model, [PROMPT, PROMPT, OTHER, OTHER], None, **settings)
    counts = [cached for cached, *_ in warm]
    assert counts[::2] == [0, 0] and counts[1] >= 48 and counts[3] >= 32
    assert_found(run(model, [PROMPT], file, **settings), warm[:1], [0])
    assert_found(run(model, [PROMPT, OTHER], file, **settings), warm[1:3], counts[1:3])
    assert_found(run(model, [OTHER, PROMPT], file, **settings), warm[3:0:-2], counts[3:0:-2])
    assert list(tmp_path.iterdir()) == [file]


def test_texts_with_another_salt_find_nothing(tiny: Tiny, tmp_path: Path) -> None:
    file, counts = tmp_path / "kv", []
    for salt in ("a", "b", "a"):
        settings = {"dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 64}
        with LLM(tiny("llama"), prefix_cache_file=file, **settings) as llm:
            asked = {"prompt_token_ids": PROMPT, "cache_salt": salt}
            (output,) = llm.generate([asked], GREEDY, use_tqdm=False)
            counts.append(output.num_cached_tokens)
    assert counts == [0, 0, 56]


def test_a_smaller_engine_takes_what_was_used_last(tiny: Tiny, tmp_path: Path) -> None:
    """And forgets what was used longest ago, as if it had computed all itself."""
    file = tmp_path / "kv"
    run(tiny("llama"), [OTHER, PROMPT], file)
    kept = (tmp_path / "copy").absolute()
    shutil.copy(file, kept)
    engine = small_engine(tiny("llama"), prefix_cache_file=str(kept), num_gpu_blocks=10)
    assert len(engine.kv.blocks.cached) == 10
    (output,) = Driver(engine).run([PROMPT], [GREEDY])
    assert output.num_cached_tokens == 56
    (output,) = Driver(engine).run([OTHER], [GREEDY])
    assert output.num_cached_tokens < 32
    engine.kv.check()
    engine.close()


def test_what_is_known_is_not_written_again(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "kv"
    run(tiny("llama"), [PROMPT], file)
    before = file.stat()
    run(tiny("llama"), [PROMPT[:50]], file)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    run(tiny("llama"), [OTHER], file)
    assert file.stat().st_ino != before.st_ino


def test_what_was_forgotten_is_not_kept(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "kv"
    run(tiny("llama"), [PROMPT], file)
    engine = small_engine(tiny("llama"), prefix_cache_file=str(file))
    engine.kv.reset_prefix_cache()
    engine.close()
    assert run(tiny("llama"), [PROMPT], file)[0][0] == 0


def test_a_file_that_finds_no_room_is_a_warning(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kv"
    run(tiny("llama"), [PROMPT], file)
    before = file.read_bytes()
    small_engine(tiny("llama"), prefix_cache_file=str(file), num_gpu_blocks=4).close()
    assert "has KV of 64 tokens, and there is room for 32" in caplog.text
    assert file.read_bytes() == before


def test_two_engines_that_close_at_once_leave_a_whole_file(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "kv"
    engines = [small_engine(tiny("llama"), prefix_cache_file=str(file)) for _ in range(2)]
    for engine, prompt in zip(engines, (PROMPT, OTHER), strict=True):
        Driver(engine).run([prompt], [GREEDY])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda engine: engine.close(), engines))
    counts = [cached for cached, *_ in run(tiny("llama"), [PROMPT, OTHER], file)]
    assert counts in ([56, 0], [0, 39]) and [*tmp_path.iterdir()] == [file]


def test_links_and_permissions_stay_and_old_parts_go(tiny: Tiny, tmp_path: Path) -> None:
    link, file, left, new = (tmp_path / n for n in ("link", "kv", "kv.x.part", "kv.y.part"))
    link.symlink_to(file)
    run(tiny("llama"), [PROMPT], link)
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    for part in (left, new):
        part.write_bytes(b"")
    os.utime(left, (time.time() - 2 * OLD_S,) * 2)
    run(tiny("llama"), [OTHER], link)
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert not left.exists() and new.exists()


def test_the_path_is_that_of_the_start(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    engine = small_engine(tiny("llama"), prefix_cache_file="kv")
    Driver(engine).run([PROMPT], [GREEDY])
    monkeypatch.chdir(tmp_path / "other")
    engine.close()
    assert (tmp_path / "kv").is_file()


def test_a_user_that_is_not_there_is_told(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="cannot be a path"):
        small_engine(tiny("llama"), prefix_cache_file="~nobody-here/kv")


def test_an_adapter_is_part_of_the_model(tiny: Tiny, tmp_path: Path) -> None:
    """Its weights, and its settings; not the way to its folder."""
    file, folder = tmp_path / "kv", tmp_path / "adapter"
    adapted = get_peft_model(load_reference(tiny("llama")), LoraConfig(r=2))
    adapted.save_pretrained(folder)
    run(tiny("llama"), [PROMPT], file, lora=str(folder))
    way = os.path.relpath(folder)
    assert run(tiny("llama"), [PROMPT], file, lora=way, seed=3)[0][0] == 56
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 3}))
    for settings in ({"lora": str(folder)}, {}):
        with pytest.raises(ConfigError, match="of another model"):
            small_engine(tiny("llama"), prefix_cache_file=str(file), **settings)


def test_requests_that_run_are_ended_first(tiny: Tiny, tmp_path: Path) -> None:
    engine = small_engine(tiny("llama"), prefix_cache_file=str(tmp_path / "kv"))
    engine.add_request(PROMPT, SamplingParams(max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.close()
    cold = run(tiny("llama"), [PROMPT], None)
    assert_found(run(tiny("llama"), [PROMPT], tmp_path / "kv"), cold, [56])


def test_a_file_that_cannot_be_written_is_a_warning(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    engine = small_engine(tiny("llama"), prefix_cache_file=str(folder / "kv"))
    Driver(engine).run([PROMPT], [GREEDY])
    folder.rmdir()
    engine.close()
    assert "was not written" in caplog.text and not folder.exists()


def test_a_write_that_fails_leaves_the_old_file(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kv"
    run(tiny("llama"), [PROMPT], file)
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    run(tiny("llama"), [OTHER], file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


# -- files that are not read


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "bfloat16"}, {"kvcache_block_size": 4}, {"quantization": "int8"}],
)
def test_kv_of_other_settings_is_refused(
    tiny: Tiny, tmp_path: Path, settings: dict[str, Any]
) -> None:
    file = tmp_path / "kv"
    run(tiny("llama"), [PROMPT], file)
    with pytest.raises(
        ConfigError, match=r"kv holds KV of another model or of other settings; give another"
    ):
        small_engine(tiny("llama"), prefix_cache_file=str(file), **settings)


def test_kv_of_other_weights_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    file, model = tmp_path / "kv", tmp_path / "m"
    shutil.copytree(tiny("llama"), model)
    run(model, [PROMPT], file)
    assert run(model, [PROMPT], file)[0][0] == 56
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][40:60] *= 2  # in the middle of a file
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="of another model"):
        small_engine(model, prefix_cache_file=str(file))


def rewritten(file: Path, **changes: torch.Tensor) -> None:
    with safe_open(str(file), "pt") as opened:
        about = opened.metadata()
    save_file(load_file(file) | changes, file, about)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("no tensors " * 50),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "no parents": lambda file: rewritten(file, parents=torch.zeros(0, dtype=torch.int32)),
    "a loop": lambda file: rewritten(file, parents=torch.arange(8, dtype=torch.int32)),
    "far away": lambda file: rewritten(file, parents=torch.full((8,), -2, dtype=torch.int32)),
    "other tokens": lambda file: rewritten(file, tokens=torch.zeros(8, 9, dtype=torch.int32)),
    "long tokens": lambda file: rewritten(file, tokens=torch.zeros(8, 8, dtype=torch.int64)),
    "no dimension": lambda file: rewritten(file, parents=torch.tensor(1, dtype=torch.int32)),
    "other salts": lambda file: rewritten(file, salts=torch.zeros(8, 32, dtype=torch.bfloat16)),
    "a bit": lambda file: rewritten(file, **{"layer.1": load_file(file)["layer.1"] * 2}),
    "no sums": lambda file: rewritten(file, sums=torch.zeros(0, 8, dtype=torch.uint8)),
    "a layer": lambda file: rewritten(file, **{"layer.1": torch.zeros(8, 2, 8, 2, 8)}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(tiny: Tiny, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "kv"
    run(tiny("llama"), [PROMPT], file)
    DAMAGES[damage](file)
    with pytest.raises(ConfigError, match=r"is damaged .*; remove it"):
        small_engine(tiny("llama"), prefix_cache_file=str(file))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ends", torch.tensor([-1])),
        ("state.0", torch.zeros(1, 2, 3)),
    ],
)
def test_states_that_do_not_fit_are_refused(
    tiny: Tiny, tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    file = tmp_path / "kv"
    run(tiny("qwen3.5"), [PROMPT], file)
    held = load_file(file)[name]
    changed = tensor.to(held.dtype).expand(len(held), *tensor.shape[1:]).contiguous()
    rewritten(file, **{name: changed})
    with pytest.raises(ConfigError, match=r"is damaged .*; remove it"):
        small_engine(tiny("qwen3.5"), prefix_cache_file=str(file))


def test_a_file_of_something_else_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(3)}, path, {ABOUT: "x"})
    with pytest.raises(ConfigError, match="of another model"):
        small_engine(tiny("llama"), prefix_cache_file=str(path))
    assert json.dumps(sorted(load_file(path))) == '["a"]'


@pytest.mark.parametrize("path", ["", "nowhere/kv", "/dev/null"])
def test_a_path_that_is_no_file_is_refused(tiny: Tiny, tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="must name a file in a folder that is there"):
        small_engine(tiny("llama"), prefix_cache_file=str(tmp_path / path))


def test_kv_that_a_codec_holds_is_in_no_file(tiny: Tiny, tmp_path: Path) -> None:
    settings = {"kv_offload_dtype": "int8", "kv_offload_gib": 0.01, "offload_mode": "stream"}
    with pytest.raises(ConfigError, match="kv_offload_dtype is 'int8'; leave one of them out"):
        small_engine(tiny("llama"), prefix_cache_file=str(tmp_path / "kv"), **settings)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"tensor_parallel_size": 2}, "for one process"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EngineConfig("m", prefix_cache_file="kv", **settings)


@needs_no_gpu
@pytest.mark.breadth
def test_on_a_gpu(tiny: Tiny, tmp_path: Path) -> None:
    """The emulated one: blocks come from both tiers, and go to both."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from virtual_gpu import VirtualGpu

    settings = {"device": "cuda", "num_gpu_blocks": 6, "kv_offload_gib": 0.01, "debug_kv": True}
    file = tmp_path / "kv"
    with VirtualGpu():
        cold = run(tiny("llama"), [PROMPT, OTHER], file, **settings)
    with VirtualGpu():
        again = run(tiny("llama"), [PROMPT, OTHER], file, **settings)
    assert [cached for cached, *_ in again] == [56, 39]
    for (_, ids, logits), (_, right, wanted) in zip(again, cold, strict=True):
        assert ids == right
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)


def test_nothing_is_held(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny("llama"), [PROMPT], tmp_path / "kv")
    engine = small_engine(tiny("llama"), prefix_cache_file=str(tmp_path / "kv"))
    assert len(engine.kv.blocks.cached) == 8  # with what was generated
    engine.kv.reset_prefix_cache()
    assert_all_free(engine)
    engine.close()
