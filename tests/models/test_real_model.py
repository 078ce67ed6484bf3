"""SmolLM2-135M: the answers, and fp32 logits against transformers reading the same GGUF itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from checkpoints import reference_logits
from driver import Driver
from marks import HAS_COMPILER, needs_compiler
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanoengine import LLM, SamplingParams
from nanoengine.kernels.cpu_linear import is_supported
from nanoengine.loading.packaged import packaged_gguf

MODEL = "smollm2-135m"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a land far away,",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees",
    "Die Hauptstadt von Deutschland ist",
    "The three primary colours are",
    "Q: Who wrote Romeo and Juliet?\nA:",
)
NUM_OUT = 32


@pytest.fixture(scope="module")
def reference_model() -> Iterator[PreTrainedModel]:
    """transformers' own reading of the GGUF."""
    path: Path = packaged_gguf("smollm2-135m")
    with pytest.MonkeyPatch.context() as patch:
        # It reads the file twice, and makes the table of names anew for each of its modules.
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    yield model.eval()


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_the_capital_of_japan(dtype: str) -> None:
    with LLM(MODEL, dtype=dtype, kv_cache_gib=0.1, max_num_seqs=4) as llm:
        messages = [{"role": "user", "content": "What is the capital of Japan?"}]
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0]
        completion = output.outputs[0]
        assert completion.text.strip() == "The capital of Japan is Tokyo."
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        config = llm.llm_engine.model_config
        shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.max_position)
        assert shape == (30, 9, 3, 8192) and config.tie_word_embeddings
        keeps_codes = HAS_COMPILER and (dtype == "float32" or is_supported())
        is_what = "codes as stored)" if keeps_codes else "dequantised to bfloat16 ("
        assert f"Q4_1 GGUF, {is_what}" in str(llm.plan)


@pytest.mark.breadth
@pytest.mark.parametrize("quantization", [pytest.param(None, marks=needs_compiler), "none"])
def test_fp32_equals_transformers(
    reference_model: PreTrainedModel, quantization: str | None
) -> None:
    """8 prompts x 32 greedy tokens in one batch: logits within 3e-3 and the same choices. Codes are
    exact; numbers are rounded to bfloat16.
    """
    settings = {"dtype": "float32", "kv_cache_gib": 0.2, "max_num_seqs": 8}
    settings |= {"quantization": quantization}
    if quantization == "none":  # the last of the two
        for parameter in reference_model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    with LLM(MODEL, max_num_batched_tokens=32, **settings) as llm:
        driver = Driver(llm.llm_engine)
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
        outputs = driver.run(prompts, params)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        logits = reference_logits(reference_model, output.prompt_token_ids + tokens)
        logits = logits[len(output.prompt_token_ids) - 1 : -1]
        ours = torch.stack(driver.logits[output.request_id])
        torch.testing.assert_close(ours, logits, atol=3e-3, rtol=0)
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 5e-3
        assert torch.equal(logits.argmax(-1)[clear], torch.tensor(tokens)[clear])
        assert clear.sum() > NUM_OUT // 2
