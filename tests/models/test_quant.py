"""Quantised weights of a GPU: within half a step of what they stand for, and products that are
theirs; PyTorch has the one of int8 on a CPU, too.

The reference quantises by itself, in numpy, and multiplies what comes back in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoengine.errors import ConfigError
from nanoengine.models import quant
from nanoengine.models.quant import Quantizer, quantise_int4, quantise_int8

Tiny = Callable[[str], Path]
CPU = torch.device("cpu")
METHODS = ("int8", "int4")
DTYPES = (torch.float32, torch.bfloat16)
LAYER_WEIGHTS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def some_weight(outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers; a row of zeros, one with a far outlier and one far from zero."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[1] = 0
    weight[2, 3] = 7.0
    weight[3] += 0.4
    return weight.to(dtype)


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).to(dtype).double().numpy()


def group_of(inputs: int) -> int:
    return 128 if inputs % 128 == 0 else 64 if inputs % 64 == 0 else 32


def nearest(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """In float32: what lies half way between two steps must fall to the same one."""
    return np.rint(values.astype(np.float32) / scales.astype(np.float32)).astype(np.float64)


def dequantised(weight: Tensor, method: str) -> Tensor:
    """The scheme as documented, by numpy: float64 [outputs, inputs]."""
    wide, dtype = weight.detach().double().numpy(), weight.dtype
    if method == "int8":
        scales = rounded(np.abs(wide).max(1, keepdims=True) / 127, dtype)
        scales[scales == 0] = 1
        return torch.from_numpy(np.clip(nearest(wide, scales), -127, 127) * scales)
    groups = wide.reshape(len(wide), -1, group_of(wide.shape[1]))
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    scales = rounded((high - low) / 15, dtype)
    scales[scales == 0] = 1
    zeros = rounded(low + 8 * scales, dtype)
    codes = np.clip(nearest(groups - zeros, scales) + 8, 0, 15)
    return torch.from_numpy(((codes - 8) * scales + zeros).reshape(wide.shape))


# -- the schemes


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = some_weight(33, 96, dtype)
    codes, scales = quantise_int8(weight)
    assert codes.dtype is torch.int8 and scales.dtype is dtype
    error = (codes.double() * scales.double()[:, None] - weight.double()).abs()
    assert (error <= scales.double()[:, None] * 0.5001).all()
    assert error.max() > 0.4 * scales.min(), "and not by much less"
    assert codes.int().abs().amax(1)[[0, 2, 3]].tolist() == [127] * 3
    assert not codes[1].any()


@pytest.mark.parametrize("group", quant.GROUPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_is_off_by_half_a_step_at_most(dtype: torch.dtype, group: int) -> None:
    weight = some_weight(33, 2 * group, dtype)
    weight[2, 3] = 0.05  # an outlier puts zero far off; its rounding is tested below
    codes, both = quantise_int4(weight, group)
    scales, zeros = (each.T.double().unsqueeze(2) for each in both.unbind(2))
    grouped = codes.double().view(33, -1, group)
    error = ((grouped - 8) * scales + zeros - weight.double().view(33, -1, group)).abs()
    assert (error <= scales * 0.5001 + zeros.abs() * 2.0**-8 * (dtype is torch.bfloat16)).all()
    assert (error[4:] <= scales[4:] * 0.5001).all(), "where zero is not far off, without allowance"
    assert (grouped.amin(2)[4:] == 0).all() and (grouped.amax(2)[4:] == 15).all()


# -- the products


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65, 200])
@pytest.mark.parametrize("shape", [(192, 96), (48, 128), (320, 576), (144, 256)])
def test_a_product_is_that_of_the_dequantised_weight(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], num_tokens: int
) -> None:
    """Few tokens and many (another way), whole weights and weights in pieces."""
    monkeypatch.setattr(quant, "_PIECE", 128 * 96)  # so that larger ones are several pieces
    for dtype in DTYPES:
        weight = some_weight(*shape, dtype)
        x = torch.randn(num_tokens, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        packed = Quantizer("int8", CPU, dtype).product(weight)
        assert packed is not None
        ours = packed(x)
        assert ours.dtype is dtype
        wide = dequantised(weight, "int8")
        exact = x.double() @ wide.T
        # Roundings of the result, and of each weight where it is unpacked to bfloat16.
        step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-20
        allowed = step * (exact.abs() + (x.double().square() @ wide.T.square()).sqrt() * 4)
        assert ((ours.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("inputs", "tiles"), [(32, 2), (96, 2), (64, 4), (576, 4), (128, 8), (4096, 8)]
)
def test_the_packed_layout_of_a_gpu_has_its_shape(inputs: int, tiles: int) -> None:
    """By PyTorch's own shape function; what is in it is tested where there is a GPU."""
    codes = torch.empty(48, inputs, dtype=torch.uint8, device="meta")
    packed = quant.pack_int4(codes)
    assert packed.shape == (48 // 8, inputs // (tiles * 16), 32, tiles // 2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 200])
@pytest.mark.parametrize("method", METHODS)
def test_products_on_a_gpu(method: str, num_tokens: int) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    for shape in ((192, 96), (320, 576), (144, 256)):
        weight = some_weight(*shape, dtype)
        packed = Quantizer(method, device, dtype).product(weight.to(device))
        assert packed is not None
        x = torch.randn(num_tokens, shape[1]).to(dtype)
        wide = dequantised(weight, method)
        exact = x.double() @ wide.T
        ours = packed(x.to(device)).double().cpu()
        spread = (x.double().square() @ wide.T.square()).sqrt()
        assert ((ours - exact).abs() <= 2.0**-8 * (exact.abs() + 4 * spread)).all()


# -- what is taken, and what is refused


def test_shapes_that_no_operator_takes_are_left_and_counted() -> None:
    quantizer = Quantizer("int8", CPU, torch.float32)
    assert quantizer.product(torch.ones(64, 48)) is None
    with pytest.raises(ConfigError, match=r"int8.*no weight of the layers has a shape"):
        quantizer.saved_bytes()
    packed = quantizer.product(torch.ones(64, 64))
    assert packed is not None
    assert "1 weights" in str(quantizer) and "1 of other shapes left" in str(quantizer)
    assert quantizer.saved_bytes() == 64 * 64 * 4 - packed.num_bytes
    for shape, is_taken in (((64, 48), False), ((40, 64), False), ((64, 64), True)):
        assert quant.Int4Weight.takes(torch.ones(shape)) == is_taken


def test_int4_on_a_gpu_wants_bfloat16() -> None:
    with pytest.raises(ConfigError, match=r'bfloat16 on cuda, got torch\.float32; set dtype="bfl'):
        Quantizer("int4", torch.device("cuda"), torch.float32)


def test_an_operator_that_fails_or_errs_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> Tensor:
        raise RuntimeError("expected scalar type Half")

    operator = "_weight_int8pack_mm"
    monkeypatch.setattr(torch, operator, broken)
    with pytest.raises(ConfigError, match=r"int8.*expected scalar type Half"):
        Quantizer("int8", CPU, torch.float32)
    monkeypatch.setattr(torch, operator, lambda x, *rest: torch.zeros(len(x), 128))
    with pytest.raises(ConfigError, match=r"int8.*product is wrong"):
        Quantizer("int8", CPU, torch.float32)
    monkeypatch.delattr(torch, operator)
    with pytest.raises(ConfigError, match=r"int8.*no attribute"):
        Quantizer("int8", CPU, torch.float32)
