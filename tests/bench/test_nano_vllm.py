"""What nano-vllm needs to run beside us on a machine without flash-attn, and its workload."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from marks import needs_no_gpu
from paged_batches import make_batch, relative_error

from benchmarks.gpu import gpu_workload
from benchmarks.gpu.gpu_measure import ON_GPU, QWEN_600M, REHEARSAL

FAKE = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature == 0.6 and ignore_eos
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, enforce_eager, max_model_len):
        import flash_attn
        from safetensors import safe_open
        assert callable(flash_attn.flash_attn_with_kvcache)
        with safe_open(f"{model}/model.safetensors", "pt") as weights:
            assert weights.keys()
    def generate(self, prompts, params, use_tqdm):
        return [{"token_ids": [0] * each.max_tokens} for each in params]
"""


def test_the_workload_is_that_of_nano_vllms_benchmark() -> None:
    prompts, lengths = gpu_workload.requests_of(ON_GPU)
    assert len(prompts) == 256 and sum(lengths) == 133_966  # as its README says
    assert min(map(len, prompts)) >= 100 and max(map(len, prompts)) <= 1024


def test_it_runs_in_a_process_of_its_own(tmp_path: Path, tiny, monkeypatch) -> None:
    source, shapes = tmp_path / "source" / "nanovllm", tmp_path / "shapes"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text(FAKE)
    REHEARSAL.shapes(shapes, QWEN_600M)
    row = gpu_workload.nano_vllm(shapes, tiny("qwen3"), REHEARSAL, str(source.parent))
    assert row["nano_vllm_attention"].startswith("a stand-in for flash-attn")
    assert row["requests"] == 4 and row["nano_vllm_output_tokens_per_s"] > 0
    monkeypatch.setattr(sys, "executable", "/bin/ls")  # does not know -m: it fails
    with pytest.raises(RuntimeError, match="nano-vllm failed: /bin/ls"):
        gpu_workload.run_nano_vllm(shapes, str(source.parent), [[1]], [1])


def test_without_its_source_the_row_says_how_to_give_it() -> None:
    row = gpu_workload.nano_vllm(Path(), Path(), REHEARSAL, None)
    assert "--nano-vllm" in row["nano_vllm"]


@needs_no_gpu
def test_the_stand_in_computes_what_flash_attn_does() -> None:
    """Prompts end to end, then decode steps over paged KV: two layers, one sequence padding."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from benchmarks.gpu.flash_stand_in import StandIn

    stand_in, scale = StandIn(), 64**-0.5
    whole = make_batch([5, 33], [5, 33], dtype=torch.float32)
    k, v = torch.cat(whole.keys), torch.cat(whole.values)
    out = stand_in.varlen(
        whole.q, k, v, cu_seqlens_q=whole.query_start(), softmax_scale=scale, causal=True,
        block_table=None, cu_seqlens_k=whole.query_start(), max_seqlen_q=33, max_seqlen_k=33,
    )  # fmt: skip
    assert relative_error(out, whole.reference()) < 1e-5
    pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for length in (700, 701):
        first = make_batch([1, 1], [length, 40], dtype=torch.float32, seed=length)
        negated = replace(first, keys=[-k for k in first.keys], k_pool=-first.k_pool)
        table = torch.full((3, 64), -1, dtype=torch.int32)
        for row, blocks in zip(table, first.tables, strict=False):
            row[: len(blocks)] = torch.tensor(blocks)
        for layer, batch in enumerate((first, negated)):
            k, v = pools.setdefault(layer, (batch.k_pool.clone(), batch.v_pool.clone()))
            k.copy_(batch.k_pool)
            v.copy_(batch.v_pool)
            out = stand_in.with_kvcache(
                torch.cat((batch.q, batch.q[:1])).unsqueeze(1), k, v, softmax_scale=scale,
                cache_seqlens=torch.tensor([length, 40, 0], dtype=torch.int32), causal=True,
                block_table=table,
            )  # fmt: skip
            assert relative_error(out[:2, 0], batch.reference()) < 1e-5
    with pytest.raises(NotImplementedError, match="whole prompts"):
        stand_in.varlen(
            whole.q, k, v, cu_seqlens_q=whole.query_start(), softmax_scale=scale, causal=True,
            block_table=table,
        )  # fmt: skip
