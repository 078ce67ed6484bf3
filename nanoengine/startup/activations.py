"""How much memory a step takes beside weights and KV, from shapes alone."""

from __future__ import annotations

import math

from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import AnyRecurrent, ModelConfig, ShortConvConfig
from nanoengine.models.activations import PIECE, PIECE_BYTES
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.draw import MOST_ROWS

# Bytes of a logit of a row that samples: in fp32 itself, without what a form forbids, and with
# penalties or as a log-probability; PyTorch ranks them, too.
IN_C, IN_PYTORCH = 16, 28
# The first three of these, and what PyTorch holds beside of rows that it draws from at once.
BESIDE_DRAWS, DRAWN = 12, 32


def activation_bytes(
    model: ModelConfig, settings: EngineConfig, element_size: int, in_c: bool
) -> int:
    """Upper bound of a step's temporary memory in bytes, from shapes (for devices not profiled).

    Per token: residual stream and norm (fp32 and model dtype), the angles of its rotations, the
    inputs of all layers, and the largest of qkv + attention state, gate_up (of experts: with their
    rows, their results and the sum) beside qkv and its attention, and what a recurrent layer holds;
    per row that samples, its logits and what sampling makes of them; and what xIELU makes at once.
    in_c: as in memory_plan.ModelFacts.
    """
    num_tokens, num_sampled = settings.max_num_batched_tokens, settings.sampled_rows
    shapes = [model.shape(layer) for layer in model.attention_layers]
    heads = max(shape.num_heads * shape.head_dim for shape in shapes)
    kv_heads = max(math.prod(shape.kv_heads) for shape in shapes)
    stream = model.hidden_size * (3 * element_size + 8) + _angle_bytes(model)
    attention = (heads + 2 * kv_heads) * (2 * element_size + 8) + heads * (4 + element_size)
    inner_size = max(shape.intermediate_size for shape in shapes)
    architecture, pieces = ARCHITECTURES[model.architecture], 0
    inner = 4 if architecture.is_gated else 3  # what is as wide as an intermediate size
    feed_forward = inner_size * inner * element_size
    if not architecture.is_gated and architecture.activation != "relu2":
        pieces = min(num_tokens * inner_size, PIECE) * PIECE_BYTES
    if (experts := model.experts) is not None:
        feed_forward = max(feed_forward, experts.shared_size * inner * element_size)
        each = model.hidden_size * 2 + experts.inner_size * inner
        sums = 8 * model.hidden_size + 16 * experts.count
        feed_forward = max(feed_forward, experts.top_k * each * element_size + sums)
    feed_forward += 2 * (heads + kv_heads) * element_size
    logits = _logit_bytes(num_sampled, in_c)
    rule = states = 0
    if (recurrent := model.recurrent) is not None:
        rule, states = _recurrent_bytes(recurrent, element_size, in_c, feed_forward)
    # Inputs of all layers live as long as the step; their norm takes most while they are made.
    inputs = model.num_layers * model.layer_input_size
    of_layer = inputs * element_size + max(attention, feed_forward, rule)
    if model.attends_beside:
        of_layer += min(attention, rule)
    made = 3 * element_size if in_c else 4 * element_size + 8
    per_token = stream + max(inputs * made, of_layer)
    if model.has_mtp:  # it has a residual stream of its own, of two vectors, and logits
        per_token += model.hidden_size * 6 * element_size
        logits += 4 * num_sampled
    of_rows = model.vocab_size * logits + settings.max_num_seqs * states
    return num_tokens * per_token + of_rows + pieces


def _angle_bytes(model: ModelConfig) -> int:
    """Of a token: cosines and sines in fp32 for each kind of rotation."""
    has_two = model.local_rope is not None
    kinds = {
        (model.shape(layer).head_dim, has_two and model.window(layer) is not None)
        for layer in model.attention_layers
    }
    return 4 * sum(head_dim for head_dim, _ in kinds)


def _logit_bytes(num_rows: int, in_c: bool) -> int:
    """Of one token's logits in all rows that sample."""
    if in_c:
        return num_rows * IN_C
    drawn = num_rows * BESIDE_DRAWS + min(num_rows, MOST_ROWS) * DRAWN
    return max(num_rows * IN_PYTORCH, drawn)


def _recurrent_bytes(
    recurrent: AnyRecurrent, element_size: int, is_fused: bool, feed_forward: int
) -> tuple[int, int]:
    """Bytes of a recurrent layer by token, and by sequence for copies of its state.

    What is projected and the result live on beside the feed-forward. A call of C holds what is
    convolved in fp32; PyTorch also q and k of each value head, and six times v for the gated norm.
    Of a short convolution PyTorch holds B x three times, and the sum and a summand in fp32.
    """
    if isinstance(recurrent, ShortConvConfig):
        ends = 4 * recurrent.channels * element_size
        if is_fused:
            return ends + feed_forward, 0
        inputs = (recurrent.conv_size - 1) * recurrent.channels * element_size
        return ends + max((8 + 3 * element_size) * recurrent.channels, feed_forward), 2 * inputs
    heads, values = recurrent.num_value_heads, recurrent.value_size
    ends = (sum(recurrent.sizes) + values + heads) * element_size
    if (
        recurrent.has_short_vectors
    ):  # what is projected lives on beside x, made of it and two products
        ends += (recurrent.channels + 2 * values + recurrent.num_decays) * element_size
    if is_fused:
        return ends + max(4 * recurrent.channels, feed_forward), 0
    rule = (4 + element_size) * recurrent.channels + 8 * heads * recurrent.key_dim + 24 * values
    if recurrent.rule == "kimi":
        rule += 12 * recurrent.num_decays
    return ends + max(rule, feed_forward), 4 * 4 * recurrent.key_dim * values
