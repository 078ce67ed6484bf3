"""nanoengine: a small LLM inference engine for contexts larger than device memory.

`LLM` and `AsyncLLM` import PyTorch, so they are imported on first use (PEP 562).
"""

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

from nanoengine.devices.collector import paused as _paused
from nanoengine.errors import (
    ConfigError,
    CorruptModelError,
    EngineClosedError,
    EngineError,
    ForkedProcessError,
    InvalidParamsError,
    InvalidPromptError,
    LogitsError,
    ModelLoadError,
    ModelNotFoundError,
    OutOfMemoryError,
    PromptTooLongError,
    RequestError,
    TransferError,
    UnsupportedModelError,
    WeightMismatchError,
)
from nanoengine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ChatMessage,
    CompletionOutput,
    MessageDelta,
    RequestOutput,
    StreamDelta,
    ToolCall,
    ToolCallDelta,
)
from nanoengine.sampling_params import (
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
)

if _TYPE_CHECKING:
    from nanoengine.api.async_llm import AsyncLLM
    from nanoengine.api.llm import LLM

if _os.environ.get("NANOENGINE_LOG_LEVEL"):
    from nanoengine.devices.logs import show_logs as _show_logs

    _show_logs(_os.environ["NANOENGINE_LOG_LEVEL"])

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatMessage",
    "CompletionOutput",
    "ConfigError",
    "CorruptModelError",
    "EngineClosedError",
    "EngineError",
    "ForkedProcessError",
    "InvalidParamsError",
    "InvalidPromptError",
    "LogitsError",
    "MessageDelta",
    "ModelLoadError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "ToolCall",
    "ToolCallDelta",
    "TransferError",
    "UnsupportedModelError",
    "WeightMismatchError",
]

_LATE = {"LLM": "nanoengine.api.llm", "AsyncLLM": "nanoengine.api.async_llm"}


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _paused():
        found: object = getattr(_importlib.import_module(_LATE[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
