"""A whole model whose weights stay codes, beside bfloat16: a part of gpu_check.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.gpu_codes import random_codes
from benchmarks.gpu.gpu_measure import Row, Scale, running, time_decode, time_prefill, token_bytes
from nanoengine.loading.loader import DummyWeights
from nanoengine.models.stored_codes import CodedRows, CodedWeight, Weight
from nanoengine.startup import parts

# Formats by a part of a tensor's name, the first that fits; "": of all other matrices. Q4_K_M has
# Q6_K for half of the values and of down; here it has it in every second layer.
MODELS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "Q4_0": {"": "Q4_0"},
    "Q4_K_M": {"lm_head": "Q6_K", "v_proj": "Q6_K", "down_proj": "Q6_K", "": "Q4_K"},
    "INT4": {"embed": "none", "lm_head": "none", "": "INT4"},  # as AWQ leaves them
    "FP8": {"embed": "none", "lm_head": "none", "": "FP8"},
}
EVERY_SECOND = ("v_proj", "down_proj")
PROMPT = 8192
NUM_STEPS = 30


def coded_decode(folder: Path, scale: Scale, read_gb_per_s: float) -> Iterator[Row]:
    """Decode of resident batches and a prompt, by the format of the weights."""
    models = {"Q4_0": MODELS["Q4_0"]} if scale.is_rehearsal else MODELS
    batches = scale.resident_batches[:3]
    most = max(num * length for num, length in batches)
    for name, formats in models.items():
        settings: dict[str, Any] = {"num_gpu_blocks": 2 * most // 256 + 8}
        settings |= {"quantization": "gguf"} if formats else {}
        if scale.device == "cpu":  # not every CPU multiplies bfloat16
            settings["dtype"] = "float32"
        with random_weights(formats, scale) as sizes, running(folder, scale, **settings) as made:
            row: Row = {"weights": name, "plan": made.plan.quantization}
            row["gb"] = round(sizes["all"] / 1e9, 3)
            for num, length in batches:
                step_s, _ = time_decode(made, [length] * num, NUM_STEPS)
                read = sizes["read"] + num * length * token_bytes(made)
                row[f"{num} requests of {length}"] = {
                    "step_ms": round(1000 * step_s, 3),
                    "tokens_per_s": round(num / step_s, 1),
                    "share_of_read": round(read / step_s / 1e9 / read_gb_per_s, 3),
                }
            length = min(PROMPT, scale.prefill_lengths[0])
            row["prompt_tokens_per_s"] = round(length / time_prefill(made, length), 1)
            yield row


@contextmanager
def random_weights(formats: Mapping[str, str], scale: Scale) -> Iterator[dict[str, int]]:
    """Random codes in place of random numbers; yields the bytes of all weights, and of those that a
    decode step reads, once a model is loaded.
    """
    plain, sizes = DummyWeights.part, {"all": 0, "read": 0}
    device = torch.device(scale.device)

    @cache
    def codes(kind: str, outputs: int, inputs: int) -> CodedRows:
        return random_codes(kind, outputs, inputs, device)

    def part(self: DummyWeights, name: str) -> Weight:
        weight, kind = plain(self, name), format_of(name, formats)
        if kind != "none" and len(weight.shape) == 2:
            rows = codes(kind, *weight.shape)
            weight = CodedWeight((CodedRows(kind, rows.rows.clone()),), torch.bfloat16)
        sizes["all"] += weight.nbytes
        sizes["read"] += 0 if "embed" in name else weight.nbytes
        return weight

    held = frozenset(formats.values()) - {"none"}  # a CPU compiles these
    found = mock.patch.object(parts, "code_formats", lambda folder: held)
    with found, mock.patch.object(DummyWeights, "part", part):
        yield sizes


def format_of(name: str, formats: Mapping[str, str]) -> str:
    """The format of a tensor, "none" for numbers."""
    found = next((part for part in formats if part in name), None)
    if found in EVERY_SECOND and int(name.split("layers.")[1].split(".")[0]) % 2:
        found = ""
    return "none" if found is None else formats[found]
