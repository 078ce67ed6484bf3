"""A Llama checkpoint whose weights are constructed, not trained: it copies what followed a key.

`python benchmarks/induction.py FOLDER` writes it (2 layers, 1 head of 128, no MLP, 1.2 MB) with a
WordLevel tokenizer. Exact retrieval is then a cheap test at any length: the answer depends on the
needle's keys and values, wherever they lie, and no near miss passes.

    hidden state   [code | ones | code of the previous token | output code], 32 dims each
    layer 0        attends to offset -1 and copies that token's code into the third part
    layer 1        looks for its own code among the previous codes and copies the code found there
                   into the fourth part, which lm_head compares with every token's code

The idea is the induction head of Elhage et al., "A Mathematical Framework for Transformer Circuits"
(2021). With rope_theta 1e12 the first 30 rotary planes (angle a position > 3e-6) tell positions
apart, and the last ones (1e-9 and less) hardly turn, so they carry content.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

VOCAB_SIZE = 512
NUM_SPECIAL = 2  # <unk> and </s>: never in a prompt, so never copied
DIMS = 32  # of a code
MAX_DOT = 16  # of two codes; a code with itself has 32
HIDDEN_SIZE = 4 * DIMS
HEAD_DIM = 128
NUM_PLANES = HEAD_DIM // 2
NUM_POSITION_PLANES = 30
NUM_CONTENT_PLANES = DIMS // 2
ROPE_THETA = 1e12
MAX_POSITION = 1 << 20
POSITION_LOGIT = 60.0  # of one plane at the right offset
CONTENT_LOGIT = 20.0  # of one dim that agrees
EPS = 1e-5
CODE, ONES, PREVIOUS, OUTPUT = (slice(part * DIMS, (part + 1) * DIMS) for part in range(4))
LAYER_TENSORS = ("q_proj", "k_proj", "v_proj", "o_proj")


def write_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer; returns
    `folder`, which is made if needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to(dtype).contiguous() for name, t in _tensors().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config() | {"dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": 1})
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"},
    )
    return folder


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": DIMS,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "max_position_embeddings": MAX_POSITION,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 1,
    }


def _tokenizer() -> Tokenizer:
    """One word per token: <unk>, </s>, t002 ... t511."""
    words = ["<unk>", "</s>", *(f"t{i:03d}" for i in range(NUM_SPECIAL, VOCAB_SIZE))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def _tensors() -> dict[str, Tensor]:
    codes = _codes()
    embedding, head = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE), torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)
    embedding[:, CODE], embedding[:, ONES], head[:, OUTPUT] = codes, 1.0, codes
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": head,
    }
    # Parts of the hidden state that are filled, each with +-1, when the layer reads it.
    for index, (weights, num_filled) in enumerate(((_find_previous(), 2), (_find_match(), 3))):
        prefix = f"model.layers.{index}."
        for name, weight in zip(LAYER_TENSORS, weights, strict=True):
            tensors[f"{prefix}self_attn.{name}.weight"] = weight
        # Undoes the division by the root mean square, the same for every token.
        norm = torch.full((HIDDEN_SIZE,), math.sqrt(num_filled * DIMS / HIDDEN_SIZE + EPS))
        tensors[f"{prefix}input_layernorm.weight"] = norm
        tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(HIDDEN_SIZE)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = torch.zeros(DIMS, HIDDEN_SIZE)
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.zeros(HIDDEN_SIZE, DIMS)
    return tensors


def _codes() -> Tensor:
    """+-1, [vocab, DIMS], no two with a dot product above MAX_DOT."""
    rng = random.Random(0)
    codes: list[int] = []
    while len(codes) < VOCAB_SIZE:
        code = rng.getrandbits(DIMS)
        if all(DIMS - 2 * (code ^ other).bit_count() <= MAX_DOT for other in codes):
            codes.append(code)
    bits = torch.tensor([[code >> dim & 1 for dim in range(DIMS)] for code in codes])
    return bits.float() * 2 - 1


def _find_previous() -> tuple[Tensor, ...]:
    """q, k, v, o of layer 0. A query points along each position plane's first axis; a key is that
    axis turned by one position, so the two agree at offset -1.
    """
    q, k, v, o = _zeros()
    planes = torch.arange(NUM_POSITION_PLANES)
    angles = ROPE_THETA ** (-planes.double() / NUM_PLANES)
    size = math.sqrt(POSITION_LOGIT * math.sqrt(HEAD_DIM))
    # Any one of the ones would do; their mean is kinder to rounding.
    q[planes, ONES] = size / DIMS
    k[planes, ONES] = (size / DIMS * angles.cos()).float().unsqueeze(1)
    k[planes + NUM_PLANES, ONES] = (size / DIMS * angles.sin()).float().unsqueeze(1)
    v[:DIMS, CODE] = torch.eye(DIMS)
    o[PREVIOUS, :DIMS] = torch.eye(DIMS)
    return q, k, v, o


def _find_match() -> tuple[Tensor, ...]:
    """q, k, v, o of layer 1: own code against previous code, on the planes that hardly turn."""
    q, k, v, o = _zeros()
    size = math.sqrt(CONTENT_LOGIT * math.sqrt(HEAD_DIM))
    planes = torch.arange(NUM_PLANES - NUM_CONTENT_PLANES, NUM_PLANES)
    dims = torch.cat((planes, planes + NUM_PLANES))
    q[dims, CODE] = size * torch.eye(DIMS)
    k[dims, PREVIOUS] = size * torch.eye(DIMS)
    v[:DIMS, CODE] = torch.eye(DIMS)
    o[OUTPUT, :DIMS] = torch.eye(DIMS)
    return q, k, v, o


def _zeros() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.zeros(HEAD_DIM, HIDDEN_SIZE) for _ in range(3))
    return q, k, v, torch.zeros(HIDDEN_SIZE, HEAD_DIM)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the constructed induction checkpoint.")
    parser.add_argument("folder", type=Path, help="where to; made if it does not exist")
    print(write_checkpoint(parser.parse_args().folder))
