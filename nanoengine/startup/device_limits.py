"""What settings ask for and their device does not do: an engine and a forecast say it alike."""

from __future__ import annotations

import torch

from nanoengine.attention.select import check_attention
from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import ModelConfig
from nanoengine.errors import ConfigError
from nanoengine.kernels.c_build import KernelBuildError, find_compiler


def check_device(config: EngineConfig, kind: str, dtype: torch.dtype, model: ModelConfig) -> None:
    """Raise ConfigError for settings that no device of this kind ("cuda", "cpu") takes."""
    check_dtype(kind, dtype)
    check_rows(config, kind)
    block_size, attention = config.kvcache_block_size, model.attention
    check_attention(config.attention_backend, kind, dtype, block_size, attention)


def why_no_kernels() -> str:
    """Why our kernels cannot be compiled for this CPU; "" if a compiler is here."""
    try:
        find_compiler()
    except KernelBuildError as error:
        return str(error)
    return ""


def codes_without_kernels(config: EngineConfig, reason: str) -> ConfigError:
    """The error about codes that are asked for on a CPU without our kernels, for this reason."""
    name = "quantization" if config.quantization in ("int8", "gguf") else "activation_dtype"
    return ConfigError(
        f"{name}={getattr(config, name)!r} needs our C kernels on a CPU: {reason}, or leave it out"
    )


def check_dtype(kind: str, dtype: torch.dtype) -> None:
    """Raise ConfigError for a dtype in which such a device does not compute."""
    if kind == "cpu" and dtype is torch.float16:
        raise ConfigError("float16 is not supported on a CPU; use bfloat16 or float32")


def check_rows(config: EngineConfig, kind: str) -> None:
    """Raise ConfigError for an activation_dtype where no kernel has rows of codes."""
    if kind != "cpu" and config.activation_dtype:
        asked = f"activation_dtype={config.activation_dtype!r}"
        raise ConfigError(f"{asked} is for a CPU; leave it out on {kind}")


def rows_without_codes(config: EngineConfig, held: str = "") -> ConfigError:
    """The error about an activation_dtype whose weights are no codes of integers. held: the codes
    that they are.
    """
    beside = f"; {held} is multiplied as numbers" if held else ""
    return ConfigError(
        f"activation_dtype={config.activation_dtype!r} needs weights that are codes of integers: "
        f'take a GGUF or quantization="int8", or leave it out{beside}'
    )
