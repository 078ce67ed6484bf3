"""What becomes of a tiny checkpoint whose config.json says something else: refused by an error of
ours, or run with the logits of transformers.

A change is made in one of five ways. "set": the model is built with another value of a key.
"several": with two to four such values. "leave out" and "null": the key of a finished checkpoint is
deleted, or null, so that defaults count. "older": its RoPE is written as before transformers 5.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# First: it sets what the libraries read at import.
from tiny_model import COMMON, LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, TinyModel  # isort: skip
import torch
from checkpoints import load_reference, reference_logits
from driver import Driver, small_engine
from tiny_models import TINY
from transformers import AutoConfig

from nanoengine import SamplingParams
from nanoengine.errors import EngineError

# Of training, tokens and what transformers itself does: they change no logit.
NO_MATHS = {
    *("architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id"),
    *("id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type"),
    *("output_attentions", "output_hidden_states", "pad_token_id", "problem_type"),
    *("return_dict", "transformers_version", "use_cache", "vision_config", "vocab_size"),
}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu")
SCORES = ("greedy", "group_limited_greedy", "noaux_tc", "sigmoid", "softmax")
OTHER_ROPES: list[dict[str, Any]] = [
    *(LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE),
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.5},
    YARN_ROPE | {"attention_factor": 0.8},
]
NESTED, ROPE = "text_config", "rope_parameters"
LENGTH, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
PROMPT = [(37 * i * i + 11 * i + 5) % 256 for i in range(100)]
PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TOLERANCE = 1e-3  # of the spread of the logits
LATENT = {"deepseek-v2", "deepseek-v3", "deepseek-v3-dense", "glm4-moe-lite", "minicpm3", "youtu"}
OF_SCORES = "`mscale_all_dim` does not sharpen the scores, as its makers trained it"
# Of MiniCPM, for which Granite stands, and the same factors under Granite's names.
FACTORS = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("scale_emb", "scale_depth", "dim_model_base", "hidden_size", "num_hidden_layers", "head_dim"),
)
WAYS = ("set", "leave out", "null")
# Differences that are meant: by models and key, None for any model.
OF_LENGTH = "the long divisors count if texts may be longer, to transformers if this one is"
KNOWN: list[tuple[set[str] | None, str, str, str]] = [
    ({"phi3"}, "set", LENGTH, OF_LENGTH),
    ({"phi3"}, "set", ORIGINAL, OF_LENGTH),
    (LATENT, "set", "head_dim", "to transformers it is how much of a latent head turns"),
    (None, "null", "rope_interleave", "a default counts, null is false to transformers"),
    (None, "null", "mamba_conv_bias", "the same"),
    (None, "null", "moe_renormalize", "the same"),
    ({"olmo-hybrid"}, "null", ROPE, "no layer turns, as its makers write it"),
    *(({"mistral4"}, how, ROPE, OF_SCORES) for how in WAYS),
    *(({"ling-2"}, how, ROPE, "Sarvam's defaults are not Ling's") for how in WAYS[1:]),
    *(({"minicpm"}, how, key, "each computes its own factors") for how in WAYS for key in FACTORS),
]


@dataclass(frozen=True, slots=True)
class Change:
    """tiny: a name of TINY. how: see above. values: of keys that are set; of others that are left
    out, None.
    """

    tiny: str
    how: str
    values: Mapping[str, Any]

    @property
    def known(self) -> str:
        """Why logits may differ; "" if they may not."""
        for names, how, key, why in KNOWN:
            hits = key in self.values and (how == self.how or (how, self.how) == ("set", "several"))
            if hits and (names is None or self.tiny in names):
                return why
        return ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: "equal", "differs", "refused", "fails" (by no error of ours), or "not theirs", which
    transformers cannot build, load or run. about: how far, or why.
    """

    kind: str
    about: str = ""


def changes(tiny: str) -> list[Change]:
    """All of one model but "several"."""
    config = _config(TINY[tiny])
    keys = [key for key in config if key not in NO_MATHS and not key.startswith("_")]
    found = [Change(tiny, "set", {key: v}) for key in keys for v in other_values(key, config[key])]
    found += [Change(tiny, how, {key: None}) for key in keys for how in ("leave out", "null")]
    return found + [Change(tiny, "older", {"type": word}) for word in ("type", "rope_type")]


def several(chance: random.Random, each: Sequence[Change]) -> Change:
    """Some of them at once, which transformers can do one by one."""
    some = chance.sample(each, chance.randint(2, 4))
    values = {key: value for change in some for key, value in change.values.items()}
    return Change(each[0].tiny, "several", values)


def other_values(key: str, value: Any) -> list[Any]:
    """Of the same type, or for null some that a key may have."""
    if key == ROPE:
        found: list[Any] = list(_other_ropes(value)) if isinstance(value, dict) else []
    elif isinstance(value, bool):
        found = [not value]
    elif isinstance(value, int):
        found = [2 * value, value // 2, value + 1, 1]
    elif isinstance(value, float):
        found = [1.7 * value + 0.01 if value else 0.3, 0.0]
    elif isinstance(value, str):
        found = [*ACTIVATIONS, *SCORES, "rope", "nope", "other"]
    elif isinstance(value, list | tuple):
        found = list(_other_lists(list(value)))
    else:
        found = [True, 2, 0.7] if value is None else []
    return [v for i, v in enumerate(found) if v != value and v not in found[:i]]


def _other_lists(values: list[Any]) -> Iterator[list[Any]]:
    if not values:
        yield from ([0], [1])
        return
    yield from (values[::-1], [values[0]] * len(values), [values[-1]] * len(values))
    if all(type(value) in (int, float) for value in values):
        yield [2 * value for value in values]


def _other_ropes(rope: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Of all layers, or of one kind of layers at a time."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        for kind, of_kind in rope.items():
            yield from ({**rope, kind: other} for other in _other_ropes(of_kind))
        return
    kept = {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    yield from (kept | other for other in OTHER_ROPES)
    for key, value in rope.items():
        if key != "rope_type":
            yield from ({**rope, key: other} for other in other_values("", value))
    for key in ("partial_rotary_factor", "attention_factor", "llama_4_scaling_beta"):
        yield {**rope, key: 0.5}


def _config(row: TinyModel) -> dict[str, Any]:
    if NESTED in row.settings:
        config = AutoConfig.for_model(row.model_type, **row.settings).to_dict()[NESTED]
    else:
        config = AutoConfig.for_model(row.model_type, **(COMMON | row.settings)).to_dict()
    return dict(config)


def outcome(change: Change, folder: Path, base: Path) -> Outcome:
    """folder: empty. base: the checkpoint of the tiny model as it is."""
    try:
        _make(change, folder, base)
        theirs = load_reference(folder)
        reference_logits(theirs, PROMPT)
    except Exception as error:  # transformers says no in as many ways
        return Outcome("not theirs", f"{type(error).__name__}: {error}"[:200])
    try:
        driver = Driver(small_engine(folder, num_threads=1))
        (output,) = driver.run([PROMPT], PARAMS)
        driver.engine.close()
    except EngineError as error:
        return Outcome("refused", str(error).replace(str(folder), "")[:200])
    except Exception as error:
        return Outcome("fails", f"{type(error).__name__}: {error}"[:200])
    ours = torch.stack(driver.logits[output.request_id])
    logits = reference_logits(theirs, PROMPT + output.outputs[0].token_ids)
    logits = logits[len(PROMPT) - 1 : -1]
    if not logits.isfinite().all():
        return Outcome("not theirs", "its logits are no numbers")
    by = float((ours[:, : logits.shape[1]] - logits).abs().max() / logits.std().clamp(min=0.01))
    return Outcome("equal" if by <= TOLERANCE else "differs", f"{by:.1e}")


def _make(change: Change, folder: Path, base: Path) -> None:
    row, values = TINY[change.tiny], dict(change.values)
    if change.how in ("set", "several"):
        nested = {NESTED: row.settings[NESTED] | values} if NESTED in row.settings else values
        replace(row, settings=row.settings | nested)(folder)
        return
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / "config.json").read_text())
    config = content.get(NESTED, content)
    if change.how == "older":
        _write_older(config, values["type"])
    else:
        for key in values:
            del config[key]
            if change.how == "null":
                config[key] = None
    (folder / "config.json").write_text(json.dumps(content))


def _write_older(config: dict[str, Any], kind_key: str) -> None:
    """`rope_theta` and `rope_scaling`, whose kind has one of two names."""
    rope = dict(config.pop(ROPE))
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            config[key] = rope.pop(key)
    kind = rope.pop("rope_type", "default")
    config["rope_scaling"] = {kind_key: kind, **rope} if kind != "default" else None
