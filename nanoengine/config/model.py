"""The shape of a model (ModelConfig) and of its parts: RoPE, recurrent layers, experts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from nanoengine.config.attention import AttentionConfig

LEAST_SUM = 1e-20  # below any sum of scores that is not 0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is transformers' `rope_type`; rope.py lists the fields of each.

    original_max_position: positions of the training, before scaling. attention_factor: multiplies
    cos and sin. divisors: one for each rotated pair of a head. length: most tokens that a request
    may have. partial_rotary_factor: the part of a head that is rotated; num_dims: how many of its
    dimensions, where that is no part (0: it is). query_beta: a query at position p is multiplied by
    1 + query_beta * log(1 + floor(p / original_max_position)).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    length: int = 0
    partial_rotary_factor: float = 1.0
    num_dims: int = 0
    query_beta: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A token's KV is a latent vector
    of kv_rank numbers and a key of rope_dim, which alone is rotated; all heads share both.

    q_rank: of the vector that queries come from; 0: they come from the residual stream. nope_dim:
    of a head's query and key beside the rotated part; value_dim: of its value. takes_turns: the two
    numbers of a rotated pair are neighbours in a checkpoint.
    """

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    takes_turns: bool

    @property
    def row_dim(self) -> int:
        """What is stored of a token: the head_dim of attention, which has one KV head."""
        return self.kv_rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Of a head's query, as the checkpoint makes it."""
        return self.nope_dim + self.rope_dim

    @property
    def kv_dim(self) -> int:
        """Of a head's key and value, as the checkpoint makes them of the latent."""
        return self.nope_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class RecurrentConfig:
    """`layers` with a recurrent rule instead of attention: "delta", the gated delta rule (arXiv
    2412.06464); "kimi", Kimi Delta Attention (arXiv 2510.26692), where each channel of a key has a
    decay; or "mamba", Mamba-2's (arXiv 2405.21060), whose C, B and x are queries, keys and values
    here. A key head serves neighbouring value heads. conv_size: tokens that the convolution
    before the rule sees.
    out_tiles: the inputs of the output projection are so many tiles, the first with the first value
    head of every key head, the second with the second; 1: value heads are in order. doubles_steps:
    a delta rule's shares of a value go up to 2 (arXiv 2411.12537). Of Kimi's rule: least_rate: what
    the logarithms of decays come no lower than, by a sigmoid; 0: they come from a softplus, without
    a bound. has_short_vectors: decays and gates are products of short vectors. Of Mamba-2:
    norm: a key of models.mamba.NORMS; has_bias, has_out_bias: of the first and the last projection.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    out_tiles: int = 1
    rule: str = "delta"
    norm: str = "after gate"
    has_bias: bool = False
    has_out_bias: bool = False
    doubles_steps: bool = False
    least_rate: float = 0.0
    has_short_vectors: bool = False

    @property
    def sizes(self) -> list[int]:
        """Numbers of a token that a rule takes: q, k and v; the gate z; of each head b, but of
        Mamba-2, and what its decays come from.
        """
        shares = [] if self.rule == "mamba" else [self.num_value_heads]
        return [self.channels, self.value_size, *shares, self.num_decays]

    @property
    def num_decays(self) -> int:
        """Of a token."""
        return self.num_value_heads * (self.key_dim if self.rule == "kimi" else 1)

    @property
    def value_size(self) -> int:
        """Numbers of v, and of what a layer gives, of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def key_size(self) -> int:
        """Numbers of q, and of k, of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: q, k and v."""
        return 2 * self.key_size + self.value_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a sequence in one layer: inputs and memory, as of context.RecurrentState."""
        inputs = self.conv_size - 1, self.channels
        return inputs, (self.num_value_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """`layers` with a gated short convolution instead of attention (LFM2, arXiv 2511.23404). Of a
    token's B, C and x the product B x is convolved, and the result multiplied by C. conv_size:
    tokens that the convolution sees. has_bias: of it, and of the products around it.
    """

    layers: tuple[int, ...]
    channels: int
    conv_size: int
    has_bias: bool = False

    @property
    def has_out_bias(self) -> bool:
        """Of the last projection."""
        return self.has_bias

    @property
    def sizes(self) -> list[int]:
        """Numbers of a token that a layer takes: B, C and x."""
        return [self.channels] * 3

    @property
    def value_size(self) -> int:
        """Numbers of what a layer gives, of a token."""
        return self.channels

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As of RecurrentConfig: there is no memory."""
        return (self.conv_size - 1, self.channels), (0,)


AnyRecurrent = RecurrentConfig | ShortConvConfig


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Each token goes to `top_k` of a layer's experts, but in dense_layers.

    inner_size: an expert's intermediate_size. scoring: what scores are, a key of
    models.experts.SCORES. renormalises: a token's are divided by their sum; then `scaling`
    multiplies them. top_groups: of num_groups groups of experts, those open to a token, which are
    those whose group_best best experts have the largest sum.
    shared_size: of the expert that all tokens go to (0: none). averages_shared: what it gives and
    the sum of the others count by half, which `scaling` does to the latter. has_bias: of all
    products here.
    has_choice_bias: scores have a bias for the choice alone; biases_logits: what they are scores of
    has it instead. least_sum: is added to the sum that scores are divided by, so that it is never
    0. exact_router: its weight is in float32, whatever the dtype of the model. latent_size: of what
    experts take and give, with a product before them and one behind their sum; 0: they take and
    give what others do.
    """

    count: int
    top_k: int
    inner_size: int
    renormalises: bool
    dense_layers: tuple[int, ...] = ()
    scoring: str = "softmax"
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    shared_size: int = 0
    averages_shared: bool = False
    has_bias: bool = False
    has_choice_bias: bool = False
    biases_logits: bool = False
    least_sum: float = LEAST_SUM
    exact_router: bool = False
    latent_size: int = 0


@dataclass(frozen=True, slots=True)
class Factors:
    """What embeddings are multiplied by, and what attention and feed-forward add to the residual
    stream, of which all norms are then; and what logits are divided by.
    """

    embeddings: float = 1.0
    summands: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Falcon-H1's (muP, arXiv 2203.03466): of what attention and the mixer take and give, of keys,
    and of the gate and the result of a feed-forward. ssm: of z, x, B, C and dt.

    No matrix is multiplied, so that codes stay what they are. The norm before the feed-forward and
    its biases take `gate`; then what it adds to the residual stream is to be multiplied by
    `summands`, which Factors have for the stream.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    ssm_in: float = 1.0
    ssm_out: float = 1.0
    ssm: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0

    @property
    def summands(self) -> float:
        """As of Factors."""
        return self.down / self.gate

    @property
    def scores(self) -> float:
        """Of the scores of queries and keys that are made of the norm itself."""
        return self.attention_in**2 * self.key

    @property
    def attended(self) -> float:
        """Of what heads attend to, before the output projection."""
        return self.attention_in * self.attention_out / self.summands

    @property
    def mixed(self) -> float:
        """Of what a mixer gives, before its output projection."""
        return self.ssm_out / self.summands

    @property
    def projected(self) -> tuple[float, ...]:
        """Of z, x, B, C and dt that are made of the norm itself."""
        return tuple(self.ssm_in * each for each in self.ssm)

    def of_bias(self, part: str) -> float:
        """Of the bias of a product, by the name of this."""
        if part in ("q", "k", "v"):
            return 1 / self.attention_in
        if part == "o":
            return self.attention_out / self.summands
        return {"in": 1 / self.ssm_in, "out": self.mixed}.get(part, self.gate)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """names: of modules, or parts of their names; patterns: of names. See loading/left_out.py."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.patterns)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a quantization_config lists: entries: the modules that stayed numbers; only: those that
    alone did not, none for all.
    """

    entries: ModuleNames = ModuleNames()
    only: ModuleNames = ModuleNames()


GIVEN = -1


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What may differ from layer to layer.

    source: the layer whose keys and values this one reads, an earlier one or itself; GIVEN: one of
    another model, see ModelConfig.given_kv.
    values_are_keys: v is k, before the norms and the rotation of these.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    source: int
    values_are_keys: bool = False

    @property
    def kv_heads(self) -> tuple[int, int]:
        """The number of KV heads, and head_dim."""
        return self.num_kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, read from config.json. `architecture` is a key of models.ARCHITECTURES.

    no_rope_layers: layers without RoPE (arXiv 2501.18795). windows: of each
    layer, None where it sees all keys or has no attention; () without any.
    query_pre_attn_scalar: its root divides the scores (None: head_dim). local_rope: RoPE of the
    layers with a window (None: as in the others). attn_logit_softcap: of the scores, see
    AttentionConfig.softcap; final_logit_softcap: of the logits. wrapper: the class in config.json
    if this is the text model of one for images, too. experts: None: all layers have a feed-forward.
    recurrent: of recurrent layers, which have no KV, unless attends_beside: they have attention
    beside the rule, which both see the same norm. bare_layers: those without a feed-forward.
    shapes: of each layer where they differ, else (); see `shape`. layer_input_size: of the vector
    that each layer gets of a token id; 0: none. codes: a key of stored_codes.FORMATS, if the
    checkpoint has matrices of layers (MXFP4: of experts) in it; "F32" if it has them quantised in a
    way of which no codes are made; else "". left_out: those matrices that it has as numbers
    nevertheless. stored_dtype: of the checkpoint's numbers, as config.json says; "" if it does not.
    latent: None: heads have keys and values of their own. has_mtp: the head for multi-token
    prediction is part of it: a layer more with attention, number num_layers, see models/mtp.py.
    has_qk_norm: False: it has none of the norms of q and k that others of its architecture have.
    norm_after_eps: of the norms of what is added to the residual stream; None: as of the others.
    given_kv: of an assistant, for each layer the one whose keys and values it reads, counted among
    the layers with attention of the model that it guesses for; () of all other models.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    rope: RopeConfig
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    windows: tuple[int | None, ...] = ()
    query_pre_attn_scalar: float | None = None
    local_rope: RopeConfig | None = None
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    norm_after_eps: float | None = None
    wrapper: str = ""
    recurrent: AnyRecurrent | None = None
    attends_beside: bool = False
    bare_layers: tuple[int, ...] = ()
    experts: ExpertsConfig | None = None
    shapes: tuple[LayerShape, ...] = ()
    layer_input_size: int = 0
    codes: str = ""
    left_out: LeftOut = LeftOut()
    stored_dtype: str = ""
    latent: LatentConfig | None = None
    has_mtp: bool = False
    has_qk_norm: bool = True
    factors: Factors = Factors()
    multipliers: Multipliers = Multipliers()
    given_kv: tuple[int, ...] = ()

    def shape(self, layer: int) -> LayerShape:
        """The shape of a layer."""
        if self.shapes:
            return self.shapes[layer]
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return LayerShape(*heads, self.intermediate_size, layer)

    @property
    def is_stored_in_16_bits(self) -> bool:
        """Whether the checkpoint's numbers are bfloat16 or float16."""
        return self.stored_dtype in ("bfloat16", "float16")

    @property
    def attention(self) -> AttentionConfig:
        """The part that attention backends need."""
        scalar = self.query_pre_attn_scalar
        scale = None if scalar is None else scalar**-0.5
        dims = tuple(shape.head_dim for shape in self.shapes)
        widest = max(dims, default=self.head_dim)
        windows = tuple(map(self.window, self.attention_layers)) if self.windows else ()
        return AttentionConfig(widest, scale, windows, dims, self.attn_logit_softcap)

    def window(self, layer: int) -> int | None:
        """The most keys that a query of this layer sees; None: all up to its own."""
        return self.windows[layer] if layer < len(self.windows) else None

    @property
    def expert_width(self) -> int:
        """Numbers that an expert takes of a token, and gives."""
        latent_size = 0 if self.experts is None else self.experts.latent_size
        return latent_size or self.hidden_size

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers whose state has the same size for any number of tokens."""
        return () if self.recurrent is None else self.recurrent.layers

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention, that of the head for multi-token prediction last."""
        layers = range(self.num_layers + self.has_mtp)
        without = frozenset(() if self.attends_beside else self.recurrent_layers)
        return [layer for layer in layers if layer not in without]

    @property
    def kv_layers(self) -> list[int]:
        """The layers that have KV of their own."""
        return [layer for layer in self.attention_layers if self.shape(layer).source == layer]

    @property
    def kv_parts(self) -> int:
        """Parts of a token's KV in a layer: K and V, or K alone, which is V, too."""
        return 2 if self.latent is None else 1

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of the KV of one token over all layers."""
        heads = [self.shape(layer).kv_heads for layer in self.kv_layers]
        return self.kv_parts * element_size * sum(num * dim for num, dim in heads)


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """A small model that guesses tokens for another one, see models/assistant.py.

    layers: its layers and its output head. hidden_size: of the other model. num_centroids: tokens
    are in so many groups, of which the num_open likeliest have logits; 0: all tokens have.
    """

    layers: ModelConfig
    hidden_size: int
    num_centroids: int = 0
    num_open: int = 0


def same_text(config: ModelConfig) -> str:
    """All that it says, in the same words in each process: sets are in order."""
    return json.dumps(asdict(config), default=_in_order)


def _in_order(value: object) -> object:
    """What JSON has no form for: a set, or a value."""
    return sorted(value) if isinstance(value, frozenset) else repr(value)
