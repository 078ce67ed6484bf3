"""Tiny checkpoints with a head for multi-token prediction beside the model, and what such a head
says, computed with transformers' own layers: transformers leaves the head out.
"""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference
from driver import Driver, small_engine
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sequence import Sequence as EngineSequence

Say = Callable[[EngineSequence, int], int]
FILE = "model.safetensors"
# What is beside the layer: Qwen's names, and those of DeepSeek and GLM.
OTHERS = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


class Head(nn.Module):
    """The head of a model, with Qwen's names."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        config, last = copy.deepcopy(model.config), model.config.num_hidden_layers - 1
        if config.model_type.startswith("qwen"):
            config.layer_types, config.mlp_only_layers, last = ["full_attention"], [], 0
        elif config.model_type == "bailing_hybrid":
            config.layer_types, config.mlp_layer_types, last = ["full_attention"], ["sparse"], 0
        norm, size = type(model.model.norm), config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = norm(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([type(model.model.layers[0])(config, last)])
        self.norm = norm(size, config.rms_norm_eps)
        self.requires_grad_(False)

    def forward(self, model: PreTrainedModel, given: Tensor, next_ids: Tensor) -> Tensor:
        """[tokens, hidden] and int64 [tokens] -> [tokens, hidden], before the output head."""
        embedded = self.pre_fc_norm_embedding(model.model.embed_tokens(next_ids))
        x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(given)), dim=-1))[None]
        num = len(given)
        places = torch.arange(num)[None]
        angles = model.model.rotary_emb(x, places)
        mask = torch.full((num, num), -torch.inf).triu(1)[None, None]
        made = self.layers[0](
            x, position_embeddings=angles, attention_mask=mask, position_ids=places
        )
        return self.norm(made)[0]


def randomize(head: Head, seed: int) -> None:
    """Random numbers, as far apart as those of TINY."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.state_dict().items():
        is_bias = name.endswith("bias")
        weight.normal_(float(weight.dim() == 1 and not is_bias), 0.2, generator=generator)


def stored(
    model: PreTrainedModel, head: Head, splits_experts: bool, as_layer: bool
) -> dict[str, Tensor]:
    """Its tensors by a checkpoint's names, with one for each expert, or one for all of them.
    as_layer: by DeepSeek's names, whatever the model is.
    """
    is_qwen = model.config.model_type.startswith("qwen") and not as_layer
    is_ling = model.config.model_type in ("bailing_hybrid", "sarvam_moe")
    layer = f"model.layers.{model.config.num_hidden_layers}."
    found: dict[str, Tensor] = {}
    for name, tensor in _with_experts(head, splits_experts):
        place, _, part = name.rpartition(".")
        if is_qwen:
            found[f"mtp.{name}"] = tensor
        elif place in OTHERS:
            other = "final_layernorm" if is_ling and place == "norm" else OTHERS[place]
            found[f"{layer}{other}.{part}"] = tensor
        else:
            found[layer + name.removeprefix("layers.0.")] = tensor
    if model.config.model_type == "sarvam_moe":
        found = {_of_ling_2(name): tensor for name, tensor in _qkv_together(found)}
    if not is_qwen and not is_ling:
        found[f"{layer}embed_tokens.weight"] = model.model.embed_tokens.weight.clone()
        found[f"{layer}shared_head.head.weight"] = model.lm_head.weight.clone()
    return found


def _qkv_together(found: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    made = []
    for name, tensor in found.items():
        if ".q_proj." in name:
            parts = (found[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv")
            made.append((name.replace(".q_proj.", ".query_key_value."), torch.cat((*parts,))))
        elif ".k_proj." not in name and ".v_proj." not in name:
            made.append((name, tensor))
    return made


def _of_ling_2(name: str) -> str:
    for usual, own in (
        *((".self_attn.", ".attention."), (".o_proj.", ".dense.")),
        *((".q_norm.", ".query_layernorm."), (".k_norm.", ".key_layernorm.")),
        ("e_score_correction_bias", "expert_bias"),
    ):
        name = name.replace(usual, own)
    return name


def _with_experts(head: Head, splits: bool) -> list[tuple[str, Tensor]]:
    found = []
    for name, tensor in head.state_dict().items():
        block, _, part = name.rpartition(".experts.")
        if not (splits and block):
            found.append((name, tensor.contiguous()))
            continue
        parts = ("gate", "up") if part == "gate_up_proj" else ("down",)
        for expert, whole in enumerate(tensor):
            for its, rows in zip(parts, whole.chunk(len(parts)), strict=True):
                key = f"{block}.experts.{expert}.{its}_proj.weight"
                found.append((key, rows.contiguous()))
    return found


def write_head(
    source: Path, target: Path, head: Head, splits_experts: bool = False, as_layer: bool = False
) -> Path:
    """A copy of the checkpoint `source` with the tensors of the head beside its own."""
    shutil.copytree(source, target)
    tensors = load_file(source / FILE)
    more = stored(reference(source), head, splits_experts, as_layer)
    save_file(tensors | more, target / FILE, {"format": "pt"})
    return target


@functools.cache
def head_of(source: Path, seed: int = 7) -> Head:
    """The random head that `with_head` writes beside a model; it exists once."""
    head = Head(reference(source))
    randomize(head, seed)
    return head


def with_head(source: Path, folder: Path, splits_experts: bool = False) -> Path:
    """The folder of a copy of the checkpoint, with its random head."""
    target = folder / f"{source.name}-mtp"
    return (
        target if target.exists() else write_head(source, target, head_of(source), splits_experts)
    )


@torch.inference_mode()
def head_logits(source: Path, ids: Sequence[int]) -> Tensor:
    """[len(ids) - 1, vocab]: of each place, what the head says of the token two further on."""
    model = reference(source)
    text = torch.tensor([*ids])
    given = model.model(text[None], use_cache=False).last_hidden_state[0]
    return model.lm_head(head_of(source)(model, given[:-1], text[1:]))


@torch.inference_mode()
def chained(source: Path, ids: Sequence[int], num: int) -> list[Tensor]:
    """The logits, [vocab] each, of the `num` guesses after `ids`, of which each begins with the
    one before it.
    """
    model, text, said = reference(source), torch.tensor([*ids]), []
    given = model.model(text[None], use_cache=False).last_hidden_state[0, :-1]
    text = text[1:]
    for _ in range(num):
        made = head_of(source)(model, given, text)[-1:]
        said.append(model.lm_head(made)[0])
        given = torch.cat((given, made))
        text = torch.cat((text, said[-1].argmax()[None]))
    return said


@torch.no_grad()
def knowing_head(source: Path, target: Path, is_right: bool) -> Path:
    """A copy of a dense Qwen model whose next token is a function of the newest one, as no layer
    adds anything; with a head that knows the function, or guesses the token that was just drawn.
    """
    model, head = reference(source), Head(reference(source))
    randomize(head, 3)
    size = model.config.hidden_size
    eye, nothing = torch.eye(size), torch.zeros(size, size)
    head.fc.weight.copy_(torch.cat((eye, nothing) if is_right else (nothing, eye), dim=1))
    for norm in (head.pre_fc_norm_embedding, head.pre_fc_norm_hidden, head.norm):
        norm.weight.zero_()  # a norm multiplies by its weight + 1
    if is_right:
        head.norm.weight.copy_(model.model.norm.weight)
    write_head(source, target, head)
    tensors = load_file(target / FILE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, target / FILE, {"format": "pt"})
    return target


def wrap(path: Path, target: Path) -> Path:
    """The checkpoint as the text model of a Qwen 3.5 for images."""
    target.mkdir()
    config = json.loads((path / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (target / "config.json").write_text(json.dumps(outer))
    inner = "model.language_model."
    tensors = {
        inner + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in load_file(path / FILE).items()
    }
    save_file(tensors, target / FILE, {"format": "pt"})
    return target


def watch_head(engine: LLMEngine, say: Say | None = None) -> list[tuple[int, int, Tensor]]:
    """(sequence, position, logits) of each guess from now on, which are finite. say: what is
    guessed instead.
    """
    sampler, said = engine.runner.mtp.sampler, []
    sample = sampler.sample

    def watched(logits: Tensor, seqs: Sequence[EngineSequence], positions: Sequence[int]) -> Tensor:
        assert logits.isfinite().all()
        rows = zip(seqs, positions, logits, strict=True)
        said.extend((seq.seq_id, position, row.clone()) for seq, position, row in rows)
        if say is None:
            return sample(logits, seqs, positions)
        return torch.tensor([say(*each) for each in zip(seqs, positions, strict=True)])

    sampler.sample = watched
    return said


def half_right(texts: list[list[int]] | dict[int, list[int]]) -> Say:
    """Two of three guesses are the texts' own tokens."""

    def say(seq: EngineSequence, position: int) -> int:
        text = texts[seq.seq_id % len(texts)]
        right = text[position] if position < len(text) else 0
        return right if (seq.seq_id + 5 * position) % 3 else (right + 1) % 256

    return say


def said_of(path: Path, patch: pytest.MonkeyPatch, **settings: Any) -> Tensor:
    """What the head of a checkpoint says in every step of some answers, [guesses, vocab]; none of
    it is checked.
    """
    patch.setattr(PayingDrafts, "choose", lambda self: 0)
    patch.setattr(PayingDrafts, "is_due", True)
    engine = small_engine(path, speculative="mtp:1", **settings)
    said = watch_head(engine)
    Driver(engine).run([[7, 3, 9], [i * 7 % 256 for i in range(40)]])
    engine.close()
    return torch.stack([row for _, _, row in said])
