"""Reads the experts of a config.json, and finds their tensors in a checkpoint.

Checkpoints hold a tensor for each expert, or one for all experts of a layer, gpt-oss's in MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nanoengine.config.model import ExpertsConfig, ModelConfig
from nanoengine.errors import CorruptModelError, UnsupportedModelError, is_one_of, shown
from nanoengine.loading.checkpoint import ALL_ROWS, Part, Rows
from nanoengine.loading.mixers import EXPERTS
from nanoengine.loading.mxfp4 import GROUP
from nanoengine.models.architecture import CHOICE_BIAS, ExpertNames
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.text.checked_json import CheckedJson

MAX_EXPERTS = 10_000
MAX_OF_ALL_LAYERS = 200_000  # each has a few tensors, which are listed before the files are read
COUNTS = ("moe_num_experts", "num_local_experts", "n_routed_experts", "num_experts")
PACKED_EXPERTS = ("experts.gate_up_proj_blocks", "experts.down_proj_blocks")  # ends of names
SHARED_SIZE = "moe_shared_expert_intermediate_size"
MLP_KINDS = {"dense", "sparse"}
_PARTS = ("gate_proj", "up_proj", "down_proj")
# Tensors for all experts of a layer: transformers' names, and those of Granite at the hub.
_WHOLE = r"(?:experts\.(gate_up|up|down)_proj(_bias|_blocks)?|(input|output)_linear\.weight)"
_OF_LINEAR = {"input": "gate_up", "output": "down"}


def read_experts(
    content: CheckedJson, names: ExpertNames | None, num_layers: int, mixers: Sequence[str] = ()
) -> ExpertsConfig | None:
    """None if no layer has any. mixers: as mixers.read_pattern. Raises CorruptModelError for
    impossible numbers.
    """
    if names is None or (names.switch and not content.flag(names.switch)):
        return None
    if names.num_shared == "num_shared_expert":
        _even(content, ("num_experts", names.top_k, names.num_shared))
    # transformers 5 writes the first name for models that have another one at the hub.
    given = next((key for key in COUNTS if content.get(key) is not None), COUNTS[-1])
    dense = tuple(i for i, mixer in enumerate(mixers) if not mixer.endswith(EXPERTS))
    dense = dense if mixers else dense_layers(content, num_layers)
    if content.get(given) == 0 or len(dense) == num_layers:
        return None
    count, inner = content.size(given, limit=MAX_EXPERTS), content.size(names.inner_size)
    if (total := count * (num_layers - len(dense))) > MAX_OF_ALL_LAYERS:
        raise CorruptModelError(
            f"{content.path}: {total} experts in {num_layers} layers are more than the "
            f"{MAX_OF_ALL_LAYERS} that are read"
        )
    scoring, shared = content.get(names.scoring_key) if names.scoring_key else names.scoring, 0
    is_scaled = names.shared == "shared_experts" or scoring == "sigmoid"
    if names.shared_size:
        has_none = content.get(names.shared_size) == 0 and not names.has_shared_gate
        shared = 0 if has_none else content.size(names.shared_size)
    elif names.shared and content.get(names.num_shared) != 0:
        _check_shared_size(content, names, inner)
        shared = inner * content.size(names.num_shared, limit=MAX_EXPERTS)
    averages = bool(shared and names.combination) and content.get(names.combination) == "average"
    scaling = content.real("routed_scaling_factor", 1.0) if is_scaled else 1.0
    return ExpertsConfig(
        count=count,
        top_k=content.size(names.top_k, limit=count),
        inner_size=inner,
        renormalises=_renormalises(content, names, scoring),
        dense_layers=dense,
        has_bias=names.has_bias,
        exact_router=names.exact_router,
        scoring=scoring,
        scaling=scaling / 2 if averages else scaling,
        shared_size=shared,
        averages_shared=averages,
        has_choice_bias=names.has_choice_bias and content.get("use_expert_bias") is not False,
        biases_logits=names.biases_logits,
        least_sum=names.least_sum,
        latent_size=_latent_size(content, names),
        **_groups(content, names, count),
    )


def _check_shared_size(content: CheckedJson, names: ExpertNames, inner: int) -> None:
    """Raise UnsupportedModelError if a key, Ling's, says that shared experts have another size."""
    size = content.get(SHARED_SIZE)
    if size not in (None, inner):
        raise UnsupportedModelError(
            f"{content.path}: {SHARED_SIZE!r} is {shown(size)}; it must be as "
            f"{names.inner_size!r}, {inner}"
        )


def _renormalises(content: CheckedJson, names: ExpertNames, scoring: str) -> bool:
    """Cohere's softmax is over the scores of the chosen alone."""
    if names.scoring_key and scoring == "softmax":
        return True
    return content.flag("norm_topk_prob") if names.renormalises is None else names.renormalises


def _latent_size(content: CheckedJson, names: ExpertNames) -> int:
    has_none = not names.latent_size or content.get(names.latent_size) is None
    return 0 if has_none else content.size(names.latent_size)


def _even(content: CheckedJson, keys: Iterable[str]) -> None:
    """Hunyuan's numbers may be lists, one for each layer."""
    for key in keys:
        value = content.get(key)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise UnsupportedModelError(
                    f"{content.path}: {key!r} differs between layers, which is not supported"
                )
            content.values[key] = value[0]


def _groups(content: CheckedJson, names: ExpertNames, count: int) -> dict[str, int]:
    """ExpertsConfig's num_groups, top_groups and group_best; {}: there are no groups."""
    group_best, method = names.group_best, names.group_method
    if not group_best or (method and content.get("topk_method") != method):
        return {}
    num_groups = content.size("n_group", 1)
    if count % num_groups or (num_groups > 1 and count < group_best * num_groups):
        raise CorruptModelError(
            f"{content.path}: 'n_group' is {num_groups}, of which {count} experts make no equal "
            f"groups of {group_best} or more"
        )
    top_groups = content.size("topk_group", 1, limit=num_groups)
    if content.size("num_experts_per_tok") > count // num_groups * top_groups:
        raise CorruptModelError(
            f"{content.path}: 'topk_group' of {top_groups} groups leaves fewer experts than "
            "'num_experts_per_tok'"
        )
    return {"num_groups": num_groups, "top_groups": top_groups, "group_best": group_best}


def dense_layers(content: CheckedJson, num_layers: int) -> tuple[int, ...]:
    """Those without experts. DeepSeek's, LFM2's: the first. GLM's: those listed by their kind.
    Qwen's: those listed, and all but every `decoder_sparse_step`-th. ERNIE's: the first, the last,
    and all but every `moe_layer_interval`-th. Raises CorruptModelError.
    """
    kinds = content.get("mlp_layer_types")
    if kinds is not None:
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or not all(is_one_of(kind, MLP_KINDS) for kind in kinds)
        ):
            raise CorruptModelError(
                f'{content.path}: \'mlp_layer_types\' must have "dense" or "sparse" for each of '
                f"{num_layers} layers, not {shown(kinds)}"
            )
        return tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    listed = content.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise CorruptModelError(
            f"{content.path}: 'mlp_only_layers' must be a list of layers, not {shown(listed)}"
        )
    step = content.size("moe_layer_interval", content.size("decoder_sparse_step", 1))
    first = _layer_of(content, "first_k_dense_replace", 0)
    first = _layer_of(content, "num_dense_layers", first)
    first = _layer_of(content, "moe_layer_start_index", first)
    last = _layer_of(content, "moe_layer_end_index", -1)
    end = num_layers if last == -1 else last + 1
    sparse = (i for i in range(first, min(end, num_layers)) if (i + 1) % step == 0)
    return tuple(sorted({*range(num_layers)} - {*sparse} | {*listed} & {*range(num_layers)}))


def _layer_of(content: CheckedJson, key: str, default: int) -> int:
    value = content.get(key)
    if value is not None and type(value) is not int:
        raise CorruptModelError(f"{content.path}: {key!r} is {shown(value)}, no number of layers")
    return default if value is None else value


class Listing(Protocol):
    """The tensors of a checkpoint, of which a CheckpointReader is one."""

    def names(self) -> set[str]:
        """Of all of them."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one."""
        ...

    def rename(self, parts: Mapping[str, Part]) -> None:
        """As CheckpointReader.rename."""
        ...


def expert_parts(config: ModelConfig, reader: Listing) -> dict[str, Part]:
    """Where the tensors of routers and experts lie, by the names in `weight_shapes`, if the
    checkpoint has other names for them. A tensor for all experts that is not of so many is left
    alone.
    """
    names, experts = ARCHITECTURES[config.architecture].experts, config.experts
    if names is None or experts is None:
        return {}
    found: dict[str, Part] = {}
    own = dict(zip(names.parts, _PARTS, strict=True))
    places = "|".join(("mlp\\.", f"{names.block}\\." * bool(names.block)))
    block = rf"(model\.layers\.\d+\.)(?:{places})"
    for stored in reader.names():
        router = rf"(?:gate|{names.router})(?:\.layer)?"
        if match := re.fullmatch(rf"{block}{router}\.(weight|bias)", stored):
            found[f"{match[1]}mlp.gate.{match[2]}"] = Part(stored)
        elif match := re.fullmatch(rf"{block}(?:gate\.)?moe_statics\.{CHOICE_BIAS}", stored):
            found[f"{match[1]}mlp.gate.{CHOICE_BIAS}"] = Part(stored, 0)  # of one group
        elif match := re.fullmatch(
            rf"{block}(?:(?:gate\.)?expert_bias|(?:gate\.|experts\.)?{CHOICE_BIAS})", stored
        ):
            found[f"{match[1]}mlp.gate.{CHOICE_BIAS}"] = Part(stored)
        elif match := re.fullmatch(rf"{block}experts\.(\d+)\.(\w+)\.weight", stored):
            part = own.get(match[3], match[3])
            found[f"{match[1]}mlp.experts.{match[2]}.{part}.weight"] = Part(stored)
        elif match := re.fullmatch(rf"{block}{_WHOLE}", stored):
            product = match[2] or _OF_LINEAR[match[4]]
            whole = _OfAll(f"{match[1]}mlp.experts.", product, match[3] or "", stored)
            if whole.is_of(experts.count, reader):
                found |= dict(whole.split(config, names, reader))
    return {name: part for name, part in found.items() if part != Part(name)}


@dataclass(frozen=True, slots=True)
class _OfAll:
    """A stored tensor for all experts of a layer, in MXFP4 if its kind is "_blocks".

    prefix: of the experts' own names. product: gate_up, up or down.
    """

    prefix: str
    product: str
    kind: str
    stored: str

    @property
    def scales(self) -> str:
        """The name of the scales in MXFP4, else ""."""
        is_packed = self.kind == "_blocks"
        return f"{self.stored.removesuffix('_blocks')}_scales" if is_packed else ""

    def is_of(self, count: int, reader: Listing) -> bool:
        """Whether its shape is one for so many experts."""
        shape = reader.shape(self.stored)
        if self.kind != "_blocks":
            return len(shape) == (2 if self.kind else 3) and shape[0] == count
        has_scales = self.scales in reader.names() and reader.shape(self.scales) == shape[:3]
        return has_scales and shape[0] == count and shape[3:] == (GROUP // 2,)

    def split(
        self, config: ModelConfig, names: ExpertNames, reader: Listing
    ) -> Iterator[tuple[str, Part]]:
        """The part of each expert; gate and up are halves of the rows, or take turns."""
        is_turned = not self.kind and (names.is_turned or self._is_turned(config, reader))
        if self.product != "gate_up":
            rows: dict[str, Rows] = {self.product: ALL_ROWS}
        elif names.is_turned:
            rows = {"gate": (0, None, 2), "up": (1, None, 2)}
        else:
            half = reader.shape(self.stored)[2 if is_turned else 1] // 2
            rows = {"gate": (0, half, 1), "up": (half, None, 1)}
        last = "bias" if self.kind == "_bias" else "weight"
        for expert in range(reader.shape(self.stored)[0]):
            for part, its in rows.items():
                name = f"{self.prefix}{expert}.{part}_proj.{last}"
                yield name, Part(self.stored, expert, its, is_turned, self.scales)

    def _is_turned(self, config: ModelConfig, reader: Listing) -> bool:
        """Whether entries are [inputs, outputs], as in Qwen3-VL's checkpoints at the hub: if their
        shape says so, as in transformers.
        """
        outputs, inputs = reader.shape(self.stored)[1:]
        width = config.expert_width
        return width == outputs != inputs if self.product != "down" else width == inputs != outputs
