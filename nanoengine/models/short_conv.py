"""The gated short convolution (LFM2, arXiv 2511.23404) in PyTorch.

Of a recurrent layer it has the convolution alone: its state is the last inputs of that, B x.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanoengine.config.model import ShortConvConfig
from nanoengine.context import ForwardContext, RecurrentState
from nanoengine.models.recurrence import convolve, new_sequences


@dataclass(frozen=True, slots=True)
class ShortConvNet:
    """The weights of a layer between its projections.

    conv        fp32 [conv_size, channels], the oldest token first
    conv_bias   fp32 [channels]; None: there is none
    """

    shape: ShortConvConfig
    conv: Tensor
    conv_bias: Tensor | None


def short_conv(x: Tensor, net: ShortConvNet, state: RecurrentState, ctx: ForwardContext) -> Tensor:
    """[tokens, 3 x channels] -> [tokens, channels]. Replaces the state.

    Rounds B x, its convolution, and the result.
    """
    b, c, x = x.split_with_sizes(net.shape.sizes, dim=1)
    return c * convolve(b * x, net.conv, state, ctx, new_sequences(ctx), net.conv_bias)
