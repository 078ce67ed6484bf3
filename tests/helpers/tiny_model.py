"""How a tiny random checkpoint is made: by transformers itself, with a tokenizer of bytes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before the libraries that read them at import.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from nanoengine.loading.wrappers import WRAPPERS

# They would be on stderr in the test that is the first to ask for a checkpoint.
logging.disable_progress_bar()

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(4)
EOS_IDS = [EOS_ID, IM_END_ID]
TOKENIZER_SIZE = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The config.json of a real model, for what reads no weights.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
COMMON = {
    "vocab_size": TOKENIZER_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Ten times the usual spread: logits far enough apart that greedy choices are rarely near ties.
    "initializer_range": 0.2,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "original_max_position_embeddings": 64,
}

HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LAGUNA = {
    "num_attention_heads_per_layer": [4, 8, 8],
    "sliding_window": 13,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": YARN_ROPE | {"partial_rotary_factor": 0.5, "attention_factor": 0.9},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
DENSE_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
LATENT = DENSE_LATENT | {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
}
NEMOTRON_H = {
    "ssm_state_size": 20,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "n_groups": 4,
    "time_step_min": 1e-9,
}
GRANITE = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 1.5,
}
GRANITE_HYBRID = GRANITE | {
    "shared_intermediate_size": 40,
    "mamba_d_state": 20,
    "mamba_n_heads": 8,
    "rms_norm_eps": 0.02,
}
FALCON_H1 = {  # multipliers as far apart as those of published models
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.65,
    "key_multiplier": 0.39,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [0.88, 0.59],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.45, 0.5, 0.6],
    "ssm_out_multiplier": 0.24,
    "mamba_d_ssm": 96,
    "mamba_d_state": 20,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
}
HYBRID_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One row of TINY: what to build and how to save it; called with a folder, it does both."""

    model_type: str = "llama"  # of transformers
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    saved_as: dict[str, Any] = field(default_factory=dict)  # settings of save_pretrained
    adds_bos: bool = True
    # transformers 5 saves the chat template as a file of its own, older checkpoints hold it in
    # tokenizer_config.json: both must load.
    template_in_own_file: bool = False
    hub_class: str = ""  # of published models, where transformers calls it otherwise

    @property
    def architecture(self) -> str:
        """Its class, as in config.json; of one for images that of its text model, as we call it."""
        if "text_config" in self.settings:
            wrapper = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[self.model_type]
            return WRAPPERS[wrapper][self.settings["text_config"]["model_type"]]
        return self.hub_class or str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])

    def __call__(self, folder: Path) -> None:
        """Build the model and save it, its tokenizer and its generation settings into `folder`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = self._random_model().eval()
            _randomize_vectors(model)
        model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_IDS)
        model.save_pretrained(folder, **self.saved_as)
        if self.hub_class:
            path = folder / "config.json"
            content = json.loads(path.read_text()) | {"architectures": [self.hub_class]}
            path.write_text(json.dumps(content))
        tokenizer = _byte_tokenizer(self.adds_bos)
        tokenizer.save_pretrained(folder, save_jinja_files=self.template_in_own_file)

    def _random_model(self) -> Any:
        """The settings of a model for images and text are under `text_config`."""
        if "text_config" in self.settings:
            config = AutoConfig.for_model(self.model_type, **self.settings)
            return AutoModelForImageTextToText.from_config(config)
        config = AutoConfig.for_model(self.model_type, **(COMMON | self.settings))
        return AutoModelForCausalLM.from_config(config)


def _randomize_vectors(model: torch.nn.Module) -> None:
    """Norm weights start as ones and biases as zeros: leave neither where a bug could not show. A
    small A lets a recurrent state remember for long.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith(("proj_bias", "correction_bias", "A_log")):
            last = name.rpartition(".")[2].removeprefix("dt_")
            centre = {"A_log": -2.0}.get(last, 0.0 if last.endswith("bias") else 1.0)
            torch.nn.init.normal_(parameter, centre, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0.0, 0.2)
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 1.0, 0.2)
        if name.endswith("act_fn.eps"):
            buffer.fill_(-0.05)


def _byte_tokenizer(adds_bos: bool) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, so any text encodes and any text comes back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
