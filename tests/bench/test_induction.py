"""The constructed checkpoint: it finds its needle, in transformers and in the engine, at 4K."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import reference

from benchmarks.induction import DIMS, MAX_DOT, VOCAB_SIZE, _codes, write_checkpoint
from nanoengine import LLM, SamplingParams
from nanoengine.bench.niah import NUM_COPIED, Sample, induction_samples
from nanoengine.text.tokenizer import Tokenizer

LENGTH = 4096
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_COPIED)
OFFLOAD = {"enable_cpu_offload": True, "kv_offload_gib": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("induction"))


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """Depths 10, 30, 50, 70, 90 %."""
    return induction_samples(Tokenizer.from_folder(folder), LENGTH, 5, seed=0)


def values(sample: Sample) -> list[int]:
    """The words of this tokenizer are t002 for token 2, and so on."""
    return [int(word[1:]) for word in sample.outputs[0].split()]


def test_codes_are_far_apart() -> None:
    dots = _codes() @ _codes().T
    assert (dots.diagonal() == DIMS).all()
    assert (dots - dots.diagonal().diag()).max() <= MAX_DOT
    assert len(dots) == VOCAB_SIZE


def test_a_prompt_holds_the_needle_once(samples: list[Sample]) -> None:
    assert [sample.depth for sample in samples] == [10, 30, 50, 70, 90]
    for sample in samples:
        ids, key = sample.prompt_ids, sample.prompt_ids[-1]
        assert len(ids) + NUM_COPIED == LENGTH
        at = ids.index(key)
        assert ids[at + 1 : at + 1 + NUM_COPIED] == values(sample)
        assert ids.count(key) == 2 and all(ids.count(value) == 1 for value in values(sample))
        assert abs(100 * at / len(ids) - sample.depth) < 1


@torch.inference_mode()
def test_transformers_copies_the_needle(folder: Path, samples: list[Sample]) -> None:
    model = reference(folder)
    for sample in samples[::4]:
        # Greedy decoding in one pass: each value is the likeliest token after the one before.
        ids = torch.tensor([sample.prompt_ids + values(sample)])
        logits = model(ids, use_cache=False, logits_to_keep=NUM_COPIED + 1).logits[0, :-1]
        assert logits.argmax(-1).tolist() == values(sample)
        best = logits.topk(2).values
        # A code with itself has 32, with any other at most 16.
        torch.testing.assert_close(best[:, 0], torch.full((NUM_COPIED,), 32.0), atol=0.01, rtol=0)
        assert (best[:, 1] <= 16.01).all()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float32", {}),
        ("float32", {"num_gpu_blocks": 6, "offload_mode": "stream", **OFFLOAD}),
        ("bfloat16", {"num_gpu_blocks": 6, "offload_mode": "stream", **OFFLOAD}),
        pytest.param(
            "float32",
            {"num_gpu_blocks": 12, "offload_mode": "stream", "ring_slots": 2, **OFFLOAD},
            marks=pytest.mark.breadth,
        ),
        pytest.param(
            "float32",
            {"num_gpu_blocks": 6, "offload_mode": "in_place", **OFFLOAD},
            marks=pytest.mark.breadth,
        ),
    ],
    ids=["resident", "stream", "stream-bf16", "stream-ring-2", "in-place"],
)
def test_the_engine_copies_the_needle(
    folder: Path, samples: list[Sample], dtype: str, settings: dict[str, object]
) -> None:
    options = {"max_num_seqs": 3, "kvcache_block_size": 128, "max_model_len": 4200, **settings}
    with LLM(folder, dtype=dtype, **options) as llm:
        prompts = [sample.prompt_ids for sample in samples]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [values(s) for s in samples]
        streams = settings.get("offload_mode") == "stream"
        assert (llm.llm_engine.kv.counters.h2d_bytes > 0) == streams
