"""How much memory a step takes beside weights and KV, from shapes alone."""

from __future__ import annotations

import math

from nanoengine.config.model import AnyRecurrent, ModelConfig, ShortConvConfig
from nanoengine.models.architectures import ARCHITECTURES
from nanoengine.models.ungated import BYTES, PIECE

# Bytes of a logit of a row that samples: in fp32 itself, without what a form forbids, and with
# penalties or as a log-probability; PyTorch ranks them, too.
IN_C, IN_PYTORCH = 16, 28


def activation_bytes(
    config: ModelConfig,
    num_tokens: int,
    num_seqs: int,
    num_sampled: int,
    element_size: int,
    in_c: bool,
) -> int:
    """Upper bound of a step's temporary memory in bytes, from shapes (for devices not profiled).

    Per token: residual stream and norm (fp32 and model dtype), the inputs of all layers, and the
    largest of qkv + attention state, gate_up (of experts: with their rows, their results and the
    sum) and what a recurrent layer holds; per row that samples, of which there are num_sampled, its
    logits and what sampling makes of them; and what Xielu makes at once. in_c: as in
    memory_plan.ModelFacts.
    """
    shapes = [config.shape(layer) for layer in config.attention_layers]
    heads = config.num_heads * max(shape.head_dim for shape in shapes)
    kv_heads = max(math.prod(shape.kv_heads) for shape in shapes)
    stream = config.hidden_size * (3 * element_size + 8)
    attention = (heads + 2 * kv_heads) * (2 * element_size + 8) + heads * (4 + element_size)
    inner_size = max(shape.intermediate_size for shape in shapes)
    architecture, pieces = ARCHITECTURES[config.architecture], 0
    inner = 4 if architecture.is_gated else 3  # what is as wide as an intermediate size
    feed_forward = inner_size * inner * element_size
    if architecture.activation == "xielu":
        pieces = min(num_tokens * inner_size, PIECE) * BYTES
    if (experts := config.experts) is not None:
        feed_forward = max(feed_forward, experts.shared_size * inner * element_size)
        each = config.hidden_size * 2 + experts.inner_size * inner
        sums = 8 * config.hidden_size + 16 * experts.count
        feed_forward = max(feed_forward, experts.top_k * each * element_size + sums)
    per_row = config.vocab_size * (IN_C if in_c else IN_PYTORCH)
    rule = states = 0
    if (recurrent := config.recurrent) is not None:
        rule, states = _recurrent_bytes(recurrent, element_size, in_c, feed_forward)
    # Inputs of all layers live as long as the step; their norm takes most while they are made.
    inputs = config.num_layers * config.layer_input_size
    of_layer = inputs * element_size + max(attention, feed_forward, rule)
    made = 3 * element_size if in_c else 4 * element_size + 8
    per_token = stream + max(inputs * made, of_layer)
    if config.has_mtp:  # it has a residual stream of its own, of two vectors, and logits
        per_token += config.hidden_size * 6 * element_size
        per_row += config.vocab_size * 4
    return num_tokens * per_token + num_sampled * per_row + num_seqs * states + pieces


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
    ends = (recurrent.channels + 2 * values + 2 * heads) * element_size
    if is_fused:
        return ends + max(4 * recurrent.channels, feed_forward), 0
    rule = (4 + element_size) * recurrent.channels + 8 * heads * recurrent.key_dim + 24 * values
    return ends + max(rule, feed_forward), 4 * 4 * recurrent.key_dim * values
