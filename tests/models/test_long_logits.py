"""SmolLM2 stretched to 16K positions by linear RoPE: streamed, resident and transformers."""

from __future__ import annotations

import faulthandler
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver
from transformers import AutoModelForCausalLM

from nanoengine import LLM, SamplingParams
from nanoengine.loading.find_model import resolve_model

POSITIONS = 16384
NUM_OUT = 64
CHUNK = 1024
OFFLOAD = {"enable_cpu_offload": True, "kv_offload_gib": 0.9, "num_gpu_blocks": 8}
MODES: dict[str, dict[str, Any]] = {
    "resident": {"num_gpu_blocks": 66},
    "in_place": OFFLOAD | {"offload_mode": "in_place"},
    # without drafts, whose rows have logits, too
    "stream": OFFLOAD | {"offload_mode": "stream", "speculative": "off"},
}


@pytest.fixture
def stretched(tmp_path: Path) -> Path:
    """The converted model with `linear` RoPE of factor 2 and twice the positions."""
    folder = tmp_path / "stretched"
    shutil.copytree(resolve_model("smollm2-135m"), folder)
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_theta", None) or config["rope_parameters"]["rope_theta"]
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": theta, "factor": 2.0}
    config["max_position_embeddings"] = POSITIONS
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def long_text(folder: Path) -> list[int]:
    """Real text, so that logits are those of a working model: our own sources, repeated."""
    with LLM(folder, num_gpu_blocks=1, max_num_seqs=1) as llm:
        text = "\n".join(p.read_text() for p in sorted(Path(__file__).parents[1].rglob("*.py")))
        ids = llm.tokenizer.encode(text)
    return (ids * (POSITIONS // len(ids) + 1))[: POSITIONS - NUM_OUT]


@pytest.mark.slow
def test_16k_logits_streamed_resident_and_transformers(stretched: Path) -> None:
    # Twelve minutes on two busy cores: longer than the guard of the other tests.
    faulthandler.dump_traceback_later(1800, exit=True)
    prompt = long_text(stretched)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    logits, tokens = {}, {}
    for mode, settings in MODES.items():
        with LLM(
            stretched, dtype="float32", max_num_batched_tokens=CHUNK, max_num_seqs=1, **settings
        ) as llm:
            driver = Driver(llm.llm_engine)
            output = driver.run([prompt], params)[0]
            assert (llm.llm_engine.kv.counters.h2d_bytes > 0) == (mode == "stream")
            logits[mode] = torch.stack(driver.logits[output.request_id])
            tokens[mode] = output.outputs[0].token_ids
    assert torch.equal(logits["stream"], logits["resident"])
    assert torch.equal(logits["in_place"], logits["resident"])
    model = AutoModelForCausalLM.from_pretrained(stretched, dtype=torch.float32).eval()
    with torch.inference_mode():
        ids = torch.tensor([prompt + tokens["resident"]])
        expected = model(ids, logits_to_keep=NUM_OUT + 1, use_cache=False).logits[0, :-1]
    error = (logits["resident"] - expected).abs().max().item()
    print(f"largest difference to transformers over {NUM_OUT} positions: {error:.2e}")
    torch.testing.assert_close(logits["resident"], expected, atol=3e-3, rtol=0)
