"""What an architecture is, a row of ARCHITECTURES: its differences from Llama, and names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nanoengine.config.model import LEAST_SUM

ROUTER = "mlp.gate.weight"  # the end of its name, whatever it has in the checkpoint
CHOICE_BIAS = "e_score_correction_bias"  # of a router; stays in float32
SINKS = "sinks"  # of heads, stay in float32, too
LATENT_NAMES = ("fc1_latent_proj", "fc2_latent_proj")  # the products around experts
# Of the head for multi-token prediction: the norms of the embedding, of what the model gave and
# before the output head; and the product that joins the first two.
MTP_NORMS = ("enorm", "hnorm", "shared_head.norm")
MTP_JOIN = "eh_proj"
HeadGate = Literal["", "sigmoid", "softplus"]
Activation = Literal["silu", "gelu_pytorch_tanh", "relu2", "xielu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class NormNames:
    """The names of a layer's norms in a checkpoint; "": no norm at this place."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What config.json and a checkpoint say of an architecture's experts.

    inner_size: the key of an expert's intermediate size. renormalises: ExpertsConfig's; None: the
    key `norm_topk_prob` says it. block, router, parts: where a checkpoint has the experts, and its
    names of the router, and of gate, up and down. has_bias, exact_router: ExpertsConfig's.
    is_turned: a tensor for all experts is [experts, inputs, outputs], and gate and up take turns.
    scoring: as in ExpertsConfig; has_choice_bias: whether scores may have a bias for the choice
    alone. biases_logits, least_sum: ExpertsConfig's. group_best: ExpertsConfig's; 0: there are no
    groups. group_method: with which `topk_method` there are; "": with any. shared: the name of the
    expert that all tokens go to; "": none. num_shared: the key of how many experts it is as wide
    as; shared_size: the key of its size, where there is one. has_shared_gate: whether it has a
    gate.
    latent_size: the key of ExpertsConfig's. top_k: the key of experts a token. scoring_key: that of
    `scoring`, where config.json says it; then a softmax renormalises. combination: the key that
    says if ExpertsConfig's averages_shared. switch: the key that says whether there are any; "":
    there are. beside: if the experts' sum is added to what a feed-forward gives, the norms after
    this, before the experts and after them; then the router has a norm and scales of its own.
    """

    inner_size: str = "moe_intermediate_size"
    renormalises: bool | None = None
    block: str = "mlp"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    has_bias: bool = False
    exact_router: bool = False
    is_turned: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    has_choice_bias: bool = False
    biases_logits: bool = False
    least_sum: float = LEAST_SUM
    group_best: int = 0
    group_method: str = ""
    shared: str = ""
    num_shared: str = "n_shared_experts"
    shared_size: str = ""
    has_shared_gate: bool = False
    latent_size: str = ""
    top_k: str = "num_experts_per_tok"
    scoring_key: str = ""
    combination: str = ""
    switch: str = ""
    beside: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a decoder differs from Llama's.

    models: what models of this architecture are called.
    recurrent_norms: the names of those of layers without attention, where these differ.
    rule_eps: eps of the norm behind a delta rule; None: as of the others.
    norm_offset: RMSNorm adds this to its weight, and is in fp32 throughout; None: neither.
    last_norm_offset: that of the norm before the output head; None: the same.
    has_norm_weights: norms of the residual stream have weights.
    norms_embeddings: embeddings go through RMSNorm without a weight.
    layer_norm: norms are LayerNorm instead, LayerOps.layer_norm. norm_bias: they have a bias.
    is_parallel: attention and feed-forward see the same norm of x, and both are added to x.
    qk_norm: RMSNorm of q and k before the rotation: over each "head", or over "all heads" at once.
    norms_of_heads: the names of these two; (): they have no weights. norms_turned: they come after
    the rotation.
    v_norm: RMSNorm of each head of v, without a weight.
    qkv_bias: q, k and v have a bias even if config.json has no key for it. out_bias: the bias that
    config.json has a key for is also of the output.
    turns_back: heads are rotated the other way, by the same angles.
    fused: what a checkpoint has one tensor for: "qkv", "gate_up".
    pairs_take_turns: the two numbers of a rotated pair are neighbours in a checkpoint, those that
    are rotated before the others.
    activation: of the gate; a key of activations.GATED. is_gated: False: feed-forwards and experts
    have no gate, but "relu2", or (in no expert) "gelu_pytorch_tanh" or "xielu".
    mtp: how a checkpoint names the head for multi-token prediction that it may hold: "mtp", in
    names that begin so; "layer", as one more layer, as all are in a GGUF; "": it holds none.
    scales_embeddings: embeddings are multiplied by the root of hidden_size.
    output_gate: q_proj gives a gate for each head beside its query; what a head attends to is
    multiplied by the gate's sigmoid. gate_proj: such a gate is of a product of its own, g_proj.
    head_gate: g_proj gives a number for each head instead, by whose sigmoid or softplus it is
    multiplied; "": it does not.
    hybrid: what a checkpoint's layers have in place of attention, or beside it; "": nothing.
    "delta": some have a gated delta rule, as config.json says. "kimi": that of Kimi, and no layer
    turns; see loading/kimi.py. "ling": that of Kimi, and the others turn; see loading/ling.py.
    "convs": some have a gated short convolution, see loading/short_convs.py. Of Mamba-2, see
    loading/mixers.py: "apart": each is a mixer (Mamba-2's or attention) or a feed-forward;
    "mixers": each is such a mixer and a feed-forward; "beside": each is a Mamba-2 mixer, attention
    beside it and a feed-forward.
    projections: of layers with a delta rule.
    windows: how config.json says which layers have a sliding window: "every layer", "layer_types"
    or "pattern"; "": a window is refused.
    ropes_in_windows: where config.json has a window, layers without one do not rotate.
    ropes_by_kind: layers with a window have a rotation of their own.
    shapes_by_layer: heads may differ from layer to layer, and layers may share keys and values; see
    loading/layer_shapes.py.
    layer_inputs: each layer may get a vector of each token id beside the residual stream.
    layer_scalar: what a layer gives is multiplied by a number of the checkpoint.
    scales_queries: config.json's RoPE may have a factor of queries, RopeConfig's query_beta.
    sinks: each head has an attention sink, see AttentionBackend.run.
    latent: keys and values come from one vector of each token, see LatentConfig.
    experts: of some layers or all; None: none.
    quantizations: values of `quant_method` whose weights are read.
    keys: usual names of keys of config.json, with those that this architecture has instead.
    names: the same of parts of names of tensors.
    reads: the keys of config.json that this architecture reads and others do not.
    requires: keys of config.json, each with the values that are supported. needs: keys that must
    be there, as what transformers has without them is not done here.
    defaults: transformers' values for missing keys of config.json, where they differ from Llama's.
    """

    models: str
    norms: NormNames = NormNames()
    recurrent_norms: NormNames | None = None
    rule_eps: float | None = None
    norm_offset: float | None = None
    last_norm_offset: float | None = None
    has_norm_weights: bool = True
    norms_embeddings: bool = False
    layer_norm: bool = False
    norm_bias: bool = False
    is_parallel: bool = False
    qk_norm: Literal["", "head", "all heads"] = ""
    norms_of_heads: tuple[str, str] | tuple[()] = ("q_norm", "k_norm")
    norms_turned: bool = False
    v_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = True
    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    pairs_take_turns: bool = False
    turns_back: bool = False
    activation: Activation = "silu"
    is_gated: bool = True
    mtp: Literal["", "mtp", "layer"] = ""
    scales_embeddings: bool = False
    output_gate: bool = False
    gate_proj: bool = False
    head_gate: HeadGate = ""
    hybrid: Literal["", "apart", "beside", "convs", "delta", "kimi", "ling", "mixers"] = ""
    projections: tuple[str, ...] = ()
    windows: Literal["", "every layer", "layer_types", "pattern"] = ""
    ropes_in_windows: bool = False
    ropes_by_kind: bool = False
    shapes_by_layer: bool = False
    layer_inputs: bool = False
    layer_scalar: bool = False
    scales_queries: bool = False
    sinks: bool = False
    latent: bool = False
    experts: ExpertNames | None = None
    quantizations: tuple[Literal["mxfp4"], ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    requires: Mapping[str, tuple[Any, ...]] = field(
        default_factory=lambda: {"hidden_act": (None, "silu", "swish")}
    )
    needs: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
