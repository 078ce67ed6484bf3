"""Chooses the parts of an engine once: device, model, kernels, attention.

Knows no requests and no steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from nanoengine.attention.select import AttentionSetup, make_attention
from nanoengine.config.engine import EngineConfig
from nanoengine.config.model import ModelConfig
from nanoengine.context import AttentionBackend
from nanoengine.devices.device import Device
from nanoengine.devices.gpu import find_graphs
from nanoengine.devices.select import make_device
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.errors import ConfigError, ModelNotFoundError
from nanoengine.kernels.c_build import SOURCE, KernelBuildError, Source, build_together
from nanoengine.kernels.call_tape import CallTape
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear, products_source, why_not
from nanoengine.kernels.cpu_ops import CpuOps, PackedOps
from nanoengine.kernels.cuda_graph import CudaGraphs, graph_size
from nanoengine.kernels.packed_weight import INTEGER_FORMATS
from nanoengine.kv.step_planner import StepPadding
from nanoengine.loading.assistant import load_assistant
from nanoengine.loading.draft_model import (
    check_pair,
    check_vocabularies,
    is_assistant,
    settings_of_draft,
)
from nanoengine.loading.find_model import find_model, is_dequantised, is_gguf
from nanoengine.loading.generation_config import read_sampling_params
from nanoengine.loading.loader import LoadedModel, code_formats, load_model
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.decoder import Decoder
from nanoengine.models.draft_model import DraftModel
from nanoengine.models.layer_ops import LayerOps, TorchOps
from nanoengine.models.make_codes import FORMAT
from nanoengine.models.shard import Sharding
from nanoengine.sampling_params import SamplingParams
from nanoengine.startup.device_limits import (
    check_dtype,
    check_rows,
    codes_without_kernels,
    rows_without_codes,
    why_no_kernels,
)
from nanoengine.startup.memory_plan import ModelFacts, describe_invariance, streams
from nanoengine.startup.weight_bytes import no_codes
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tokenizer_files import chat_template_of, check_tokenizer_is_there, path_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ComputeParts:
    """What computes a step. model: decoder, weights and shape; ops: computes its layers."""

    folder: Path
    model: LoadedModel
    ops: LayerOps
    attention: AttentionBackend
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class Parts(ComputeParts):
    """The parts of an engine. tokenizer: None if the model has none. default_params: for requests
    without parameters.
    """

    tokenizer: Tokenizer | None
    default_params: SamplingParams


class RecordedSharding(Sharding, Protocol):
    """A Sharding, and what records its gathers: there the kernels record their calls, too."""

    tape: CallTape | None


def make_engine_device(config: EngineConfig) -> Device:
    """Make the config's device, wrapped in a CheckedDevice with debug_kv. Raises ConfigError."""
    delay_s = config.debug_copy_delay_ms / 1000
    has_workers = streams(config, "cpu")
    device = make_device(config.device, config.num_threads, has_workers, delay_s)
    return CheckedDevice(device) if config.debug_kv else device


def load_parts(
    config: EngineConfig, device: Device, sharding: RecordedSharding | None = None
) -> Parts:
    """Choose the kernels, load the model and its tokenizer. Raises ConfigError, ModelLoadError.

    sharding: None loads the whole model.
    """
    folder = find_folder(config, device)
    if config.tokenizer:
        check_tokenizer_is_there(path_of(config.tokenizer))
    template = None if config.chat_template is None else chat_template_of(config.chat_template)
    is_asked = config.generation_config == "auto"
    params = read_sampling_params(folder) if is_asked else SamplingParams()
    with ThreadPoolExecutor(1) as thread:  # parse the vocabulary while weights are packed
        tokenizer = thread.submit(load_tokenizer, config, folder, template)
        loaded = load_compute_parts(config, device, folder, sharding)
    own = {field.name: getattr(loaded, field.name) for field in fields(loaded)}
    return Parts(**own, tokenizer=tokenizer.result(), default_params=params)


def usable_settings(config: EngineConfig, parts: ComputeParts, device: Device) -> EngineConfig:
    """The settings, with the guesses that this model and these kernels can do with."""
    if parts.model.config.recurrent_layers:  # each draft of the whole model would change the states
        counts = {"ngram": config.num_guesses, "mtp": config.num_mtp}
        kept = "+".join(f"{name}:{num}" for name, num in counts.items() if num)
        return replace(config, speculative=kept or "off")
    # Nobody asked for drafts: they are made where they change no bit, and may be worth most.
    drafts = parts.facts.is_invariant and streams(config, device.name)
    if config.speculative is None and not drafts:
        return replace(config, speculative="off")
    return config


def step_padding(config: EngineConfig, parts: ComputeParts, device: Device) -> StepPadding:
    """How decode steps are padded: for graphs, and where guesses must not show in products."""
    can_use_graphs = parts.ops.replays_graphs and parts.attention.can_replay
    uses_graphs = can_use_graphs and not (config.enforce_eager or device.is_checked)
    checked_rows = 0 if parts.facts.is_invariant else config.checked_rows
    return StepPadding(graph_size if uses_graphs else None, checked_rows)


def find_folder(config: EngineConfig, device: Device) -> Path:
    """The folder of the model, see `find_model`. A GGUF keeps its codes if this is asked for, or if
    nothing is and these kernels take them.
    """
    method = config.quantization
    can_keep = method is None and is_gguf(config.model) and not _why_numbers(config, device)
    return find_model(config.model, config.load_format, method == "gguf" or can_keep)


def _why_numbers(config: EngineConfig, device: Device) -> str:
    """Why a GGUF is dequantised where nothing is asked for; "" if it keeps its codes."""
    dtype, _ = choose_dtype(config, device)
    if device.name != "cpu":
        takes_codes = choose_ops(config, device, None, dtype).takes_codes
        return "" if takes_codes else f"codes need Triton on {device.name}, which has none"
    return why_no_kernels() or why_not(dtype)


def load_compute_parts(
    config: EngineConfig, device: Device, folder: Path, sharding: RecordedSharding | None
) -> ComputeParts:
    """Choose the kernels and load the model in `folder`. Raises ConfigError, ModelLoadError."""
    dtype, dtype_reason = choose_dtype(config, device)
    if config.kv_offload_dtype == "bf12":
        _check_bf12(device)
    method = config.quantization
    model, ops, kernels, no_kernels = _load(config, device, folder, dtype, sharding)
    _warn_of_slowness(no_kernels)
    if method in ("int8", "gguf") and not model.codes:
        raise no_codes(method)
    if config.activation_dtype and not INTEGER_FORMATS.intersection(model.codes):
        raise rows_without_codes(config, ", ".join(model.codes))
    setup = AttentionSetup(
        device.torch_device,
        dtype,
        config.kvcache_block_size,
        model.config.attention,
        kernels,
        no_kernels,
        max(1, config.checked_rows),
    )
    attention, reasons = make_attention(config.attention_backend, setup)
    if config.num_assisted:
        model = _with_guesser(model, folder, config, device, ops, setup)
    is_lossy = config.kv_offload_dtype == "int8"
    invariant = ops.is_batch_invariant, attention.is_batch_invariant, is_lossy
    are_ranks = sharding is not None
    source = model.source
    if ops.saved_bytes > 0 and not model.codes:
        share = model.weight_bytes / (model.weight_bytes + ops.saved_bytes)
        source += f"; held in {8 * dtype.itemsize * share:.1f} bits a number, exactly"
    if method is None and is_dequantised(folder):
        source += f" ({_why_numbers(config, device)})"
    facts = ModelFacts(
        source=source,
        dtype=dtype,
        dtype_reason=dtype_reason,
        weight_bytes=model.weight_bytes,
        attention=f"{attention.name} ({reasons})" if reasons else attention.name,
        quantization=describe_codes(model.codes, dtype, config),
        invariance=describe_invariance(*invariant, are_ranks),
        is_invariant=invariant == (True, True, False),
        in_c=kernels is not None,
        draft=None if model.draft is None else model.draft.config,
    )
    return ComputeParts(folder, model, ops, attention, facts)


def _load(
    config: EngineConfig,
    device: Device,
    folder: Path,
    dtype: torch.dtype,
    sharding: RecordedSharding | None,
) -> tuple[LoadedModel, LayerOps, CpuKernels | None, str]:
    """The model in `folder`, its operations, the C kernels, and why there are none."""
    formats = _code_formats(config, device, folder)
    if config.quantization == "gguf" and config.load_format != "dummy" and not formats:
        raise no_codes(config.quantization)
    tape = sharding.tape if sharding else None
    kernels, no_kernels = find_kernels(config, device, tape, dtype, formats)
    ops = _code_ops(config, device, formats, kernels or no_kernels, dtype)
    ops = ops or choose_ops(config, device, kernels, dtype)
    model = load_model(folder, config, device.torch_device, dtype, ops, sharding)
    return model, ops, kernels, no_kernels


def _with_guesser(
    model: LoadedModel,
    folder: Path,
    config: EngineConfig,
    device: Device,
    ops: LayerOps,
    setup: AttentionSetup,
) -> LoadedModel:
    """The model in `folder` with what `draft_model` names. setup: of the model's attention."""
    own = settings_of_draft(config)
    found, on = find_folder(own, device), device.torch_device
    if is_assistant(found):
        ends = model.decoder.ends
        assistant, num_bytes = load_assistant(found, model.config, ends, on, setup.dtype, ops)
        return replace(model, assistant=assistant, weight_bytes=model.weight_bytes + num_bytes)
    check_pair(read_model_config(found), model.config, own.model)
    check_vocabularies(folder, found)
    draft = _draft_model(model.config, own, device, found, setup)
    return replace(model, draft=draft, weight_bytes=model.weight_bytes + draft.weight_bytes)


def _draft_model(
    model: ModelConfig, config: EngineConfig, device: Device, folder: Path, setup: AttentionSetup
) -> DraftModel:
    """The one in `folder`, for `model`. config: of settings_of_draft."""
    loaded, *_ = _load(config, device, folder, setup.dtype, None)
    own = replace(setup, config=loaded.config.attention)
    attention, _ = make_attention(config.attention_backend, own)
    assert isinstance(loaded.decoder, Decoder)
    return DraftModel(
        loaded.decoder,
        attention,
        loaded.config,
        len(model.attention_layers),
        model.vocab_size,
        loaded.weight_bytes,
    )


def describe_codes(codes: Mapping[str, int], dtype: torch.dtype, config: EngineConfig) -> str:
    """A line for the plan, from how many weights are codes of each format; "" if none is."""
    if not codes:
        return ""
    counts = ", ".join(f"{count} of {name}" for name, count in sorted(codes.items()))
    label = "int8 (lossy)" if config.quantization == "int8" else "codes as stored"
    rows = f"; activations in {config.activation_dtype} (lossy)" if config.activation_dtype else ""
    return f"{label}: {counts}; the rest in {str(dtype).removeprefix('torch.')}{rows}"


def choose_dtype(config: EngineConfig, device: Device) -> tuple[torch.dtype, str]:
    """The dtype of weights and KV, and the reason for it. Raises ConfigError."""
    if config.dtype == "auto":
        return device.auto_dtype()
    dtype: torch.dtype = getattr(torch, config.dtype)
    check_dtype(device.name, dtype)
    return dtype, "as asked"


def find_kernels(
    config: EngineConfig,
    device: Device,
    tape: CallTape | None,
    dtype: torch.dtype,
    formats: frozenset[str],
) -> tuple[CpuKernels | None, str]:
    """The C kernels, or None and the reason if they cannot be used. tape: records their calls.
    config, dtype, formats: say which products will be loaded, which are compiled beside it.
    """
    if device.name != "cpu":
        return None, ""
    if not why_not(dtype):
        rounds_rows = bool(formats) and _rounds_rows(config)
        build_together(Source(SOURCE), products_source(dtype, formats, rounds_rows))
    try:
        return CpuKernels.load(tape=tape), ""
    except KernelBuildError as error:
        return None, str(error)


def _warn_of_slowness(no_kernels: str) -> None:
    """no_kernels: why a CPU computes without ours, else ""."""
    if no_kernels:
        logger.warning(
            "PyTorch computes, several times slower, as our kernels cannot be used: %s", no_kernels
        )


def choose_ops(
    config: EngineConfig, device: Device, kernels: CpuKernels | None, dtype: torch.dtype
) -> LayerOps:
    """The fastest implementation of the layers on this machine."""
    if device.torch_device.type == "npu":
        return TorchOps()  # Triton for it is another package, which nobody has tried here
    if device.name != "cpu":
        return _gpu_ops(config, device)
    if kernels is None:
        return TorchOps()
    try:
        return PackedOps(kernels, CpuLinear.load(kernels.tape, dtype=dtype))
    except KernelBuildError:
        return CpuOps(kernels)


def _rounds_rows(config: EngineConfig) -> bool:
    return config.activation_dtype == "int8"


def _code_formats(config: EngineConfig, device: Device, folder: Path) -> frozenset[str]:
    """The formats of codes that weights have here, or shall have: keys of FORMATS."""
    method = config.quantization
    if method == "int8":
        return frozenset((FORMAT,))
    if method == "none" or (method is None and device.name != "cpu"):  # a GPU compiles none apart
        return frozenset()
    return code_formats(folder)


def _code_ops(
    config: EngineConfig,
    device: Device,
    formats: frozenset[str],
    kernels: CpuKernels | str,
    dtype: torch.dtype,
) -> LayerOps | None:
    """Operations that multiply with codes, where weights are; None where none can.

    formats: of the codes. kernels: or the reason for having none. Raises ConfigError if
    `quantization` needs them.
    """
    method = config.quantization
    check_rows(config, device.name)
    if device.name != "cpu":
        ops = choose_ops(config, device, None, dtype)
        if ops.takes_codes or method in (None, "none"):
            return ops
        raise ConfigError(
            f"quantization={method!r} needs Triton on {device.name}, which has none; leave it out"
        )
    if not (formats or config.activation_dtype):
        return None
    reason = kernels if isinstance(kernels, str) else why_not(dtype)
    if not formats and not reason:
        raise rows_without_codes(config)
    if not isinstance(kernels, str) and not reason:
        try:
            rounds_rows = _rounds_rows(config)
            products = CpuLinear.load(
                kernels.tape, dtype=dtype, formats=formats, rounds_rows=rounds_rows
            )
            return PackedOps(kernels, products)
        except KernelBuildError as error:
            reason = str(error)
    if method is None and config.activation_dtype is None:
        return None
    raise codes_without_kernels(config, reason)


def _check_bf12(device: Device) -> None:
    """Raise ConfigError where no kernel can read host KV."""
    kind = device.torch_device.type
    if kind != "cpu" and (kind != "cuda" or find_spec("triton") is None):
        lacks = "Triton is not installed" if kind == "cuda" else f"the device is {kind!r}"
        raise ConfigError(
            'kv_offload_dtype="bf12" needs a CPU, or a GPU of device="cuda" with Triton: '
            f"{lacks}; leave kv_offload_dtype out"
        )


def _gpu_ops(config: EngineConfig, device: Device) -> LayerOps:
    try:
        from nanoengine.kernels.gpu_ops import GpuOps  # imports triton: a GPU's PyTorch has it
    except ImportError:
        return TorchOps()
    vendor = None if config.enforce_eager else find_graphs(device.torch_device)
    settle = device.synchronize if config.tensor_parallel_size > 1 else None
    graphs = None if vendor is None else CudaGraphs(vendor, settle)
    return GpuOps(graphs)


def load_tokenizer(config: EngineConfig, folder: Path, template: str | None) -> Tokenizer | None:
    """The tokenizer of the setting, else the model's; None if the model has none. template: of its
    chats, None for its own.
    """
    if config.tokenizer:
        return Tokenizer.from_folder(path_of(config.tokenizer), template)
    try:
        return Tokenizer.from_folder(folder, template)
    except ModelNotFoundError:
        return None  # callers can give token ids
