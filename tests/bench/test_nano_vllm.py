"""What nano-vllm needs to run beside us on a machine without flash-attn, and its workload."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_no_gpu
from paged_batches import Batch, make_batch, relative_error

from benchmarks.gpu import gpu_workload
from benchmarks.gpu.flash_stand_in import StandIn
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


@pytest.mark.breadth
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
def test_the_stand_in_computes_whole_prompts() -> None:
    stand_in = StandIn()
    batch = make_batch([5, 33], [5, 33], dtype=torch.float32)
    about: dict[str, Any] = {"softmax_scale": batch.scale, "causal": True}
    about |= {"cu_seqlens_q": batch.query_start(), "cu_seqlens_k": batch.query_start()}
    kv = torch.cat(batch.keys), torch.cat(batch.values)
    out = stand_in.varlen(batch.q, *kv, **about, block_table=None)
    assert relative_error(out, batch.reference()) < 1e-5
    with pytest.raises(NotImplementedError, match="whole prompts"):
        stand_in.varlen(batch.q, *kv, **about, block_table=torch.zeros(2, 1))


@needs_no_gpu
def test_a_graph_of_the_stand_in_decodes_what_its_tensors_hold_later() -> None:
    """Two layers and a sequence that is padding, captured with one batch, replayed with another."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from virtual_gpu import VirtualGpu

    stand_in = StandIn()
    first, second = (
        make_batch([1, 1], lengths, dtype=torch.float32, seed=lengths[0])
        for lengths in ([520, 200], [200, 520])
    )
    with VirtualGpu():
        layers = [_layer(first, sign) for sign in (1, -1)]
        shared = [x.to("cuda") for x in _shared(first)]

        def step() -> list[torch.Tensor]:
            q, lens, table = shared
            about: dict[str, Any] = {"cache_seqlens": lens, "block_table": table, "causal": True}
            scale = first.scale
            return [stand_in.with_kvcache(q, k, v, **about, softmax_scale=scale) for k, v in layers]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()
        for batch in (first, second):
            for held, tensor in zip(shared, _shared(batch), strict=True):
                held.copy_(tensor.to("cuda"))
            for layer, sign in zip(layers, (1, -1), strict=True):
                for held, tensor in zip(layer, _layer(batch, sign), strict=True):
                    held.copy_(tensor)
            graph.replay()
            with torch._C.DisableTorchFunction():
                for out, sign in zip(outs, (1, -1), strict=True):
                    wanted = replace(batch, keys=[sign * k for k in batch.keys]).reference()
                    assert relative_error(out[:2, 0], wanted) < 1e-5


def _layer(batch: Batch, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer; another layer's keys are negated."""
    return (sign * batch.k_pool).to("cuda"), batch.v_pool.clone().to("cuda")


def _shared(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, lengths and block table, with a row of padding."""
    table = torch.full((3, 64), -1, dtype=torch.int32)
    for row, blocks in zip(table, batch.tables, strict=False):
        row[: len(blocks)] = torch.tensor(blocks)
    lens = torch.tensor([*batch.kv_lens, 0], dtype=torch.int32)
    return torch.cat((batch.q, batch.q[:1])).unsqueeze(1), lens, table
