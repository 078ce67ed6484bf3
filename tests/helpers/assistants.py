"""Random assistants of the tiny Gemma 4s, and what transformers says that they guess."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from checkpoints import load_reference
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

from nanoengine.engine.assistant_drafter import AssistantDrafter
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.sequence import Sequence as EngineSequence

NUM_CENTROIDS, NUM_OPEN = 13, 3
Say = Callable[[EngineSequence, int], int]


@contextmanager
def storing_kv() -> Iterator[None]:
    """transformers 5.23 refuses assistants, and stores no KV for them if no layer shares any."""

    def modes(config: Any) -> list[str | None]:
        num, num_shared = config.num_hidden_layers, config.num_kv_shared_layers
        last = {kind: i for i, kind in enumerate(config.layer_types[: num - num_shared])}
        own = ["store" if i in last.values() else None for i in range(num - num_shared)]
        return [*own, *["reuse"] * num_shared]

    classes: tuple[Any, ...] = Gemma4TextConfig, Gemma4UnifiedTextConfig
    before = [each.kv_sharing_modes for each in classes]
    try:
        for each in classes:
            each.kv_sharing_modes = property(modes)
        yield
    finally:
        for each, known in zip(classes, before, strict=True):
            each.kv_sharing_modes = known


def write_assistant(
    source: Path, target: Path, has_centroids: bool = False, **changed: Any
) -> Path:
    """Save a random assistant of the model in `source` as `target`. changed: keys of its layers."""
    of = json.loads((source / "config.json").read_text())
    is_unified = of["model_type"] == "gemma4_unified_text"
    full = str(of["layer_types"].index("full_attention"))
    layers = {
        "vocab_size": of["vocab_size"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": of["num_attention_heads"],
        "num_key_value_heads": of["num_key_value_heads"],
        "head_dim": of["head_dim"],
        "sliding_window": of["sliding_window"],
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": of["max_position_embeddings"],
        "rope_parameters": of["rope_parameters"],
        "per_layer_config": {2: of["per_layer_config"][full]},
    }
    if not is_unified:
        layers |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    kind = "gemma4_unified" if is_unified else "gemma4"
    inner = AutoConfig.for_model(f"{kind}_text", **layers | changed)
    named: Any = Gemma4UnifiedAssistantConfig if is_unified else Gemma4AssistantConfig
    of_centroids = {"num_centroids": NUM_CENTROIDS, "centroid_intermediate_top_k": NUM_OPEN}
    config = named(
        text_config=inner,
        backbone_hidden_size=of["hidden_size"],
        use_ordered_embeddings=has_centroids,
        **of_centroids if has_centroids else {},
    )
    classes: tuple[Any, ...] = Gemma4UnifiedAssistantForCausalLM, Gemma4AssistantForCausalLM
    with storing_kv(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(len(target.name))
        model = classes[not is_unified](config)
        for name, tensor in model.state_dict().items():
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor)))
            else:
                tensor.normal_(float(tensor.dim() == 1), 0.2)
        model.save_pretrained(target)
    return target


@functools.cache
def models_of(source: Path, assistant: Path) -> tuple[Any, Any]:
    """The model and its assistant in transformers. There a window of the assistant has a key more
    than one of the model has; here, as in vLLM, both are alike.
    """
    kind = json.loads((assistant / "config.json").read_text())["architectures"][0]
    classes = Gemma4UnifiedAssistantForCausalLM, Gemma4AssistantForCausalLM
    with storing_kv():
        model = load_reference(source)
        named: Any = next(each for each in classes if each.__name__ == kind)
        helper = named.from_pretrained(assistant)
    helper.config.text_config.sliding_window -= 1
    return model, helper


@torch.inference_mode()
def said_by_transformers(
    source: Path, assistant: Path, ids: Sequence[int], guesses: Sequence[int]
) -> list[Tensor]:
    """The logits, [vocab] each, of the guesses after `ids`, each of which begins with the one
    before.
    """
    model, helper = models_of(source, assistant)
    text = torch.tensor([ids])
    out = model(
        text[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False
    )
    given, newest, said = out.hidden_states[-1][:, -1:], text[:, -1:], []
    for guess in guesses:
        embedded = model.get_input_embeddings()(newest)
        made = helper(
            inputs_embeds=torch.cat((embedded, given), dim=-1),
            position_ids=torch.tensor([[len(ids) - 1]]),
            shared_kv_states=out.shared_kv_states,
        )
        said.append(made.logits[0, 0])
        given, newest = made.last_hidden_state, torch.tensor([[guess]])
    return said


def watch_assistant(engine: LLMEngine, say: Say | None = None) -> dict[tuple[int, int], Tensor]:
    """The logits of each guess from now on, which are numbers, by sequence and position. say: what
    is guessed instead.
    """
    drafter, said = engine.runner.drafter, {}
    assert isinstance(drafter, AssistantDrafter)
    sampler: Any = drafter.sampler
    sample = sampler.sample

    def watched(logits: Tensor, seqs: Sequence[EngineSequence], positions: Sequence[int]) -> Any:
        assert not logits.isnan().any()
        for seq, position, row in zip(seqs, positions, logits, strict=True):
            said[seq.seq_id, position] = row.clone()
        if say is None:
            return sample(logits, seqs, positions)
        return torch.tensor([say(*each) for each in zip(seqs, positions, strict=True)])

    sampler.sample = watched
    return said
