"""nanoengine: a small LLM inference engine for contexts larger than device memory.

Names are imported on first use (PEP 562): `LLM` and `AsyncLLM` import PyTorch, and the command
`nanoengine` wants to be there before anything else is imported.
"""

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from nanoengine.api.async_llm import AsyncLLM
    from nanoengine.api.llm import LLM
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

_HEAVY = {"LLM": "api.llm", "AsyncLLM": "api.async_llm"}
_LIGHT = ("errors", "outputs", "sampling_params")


def __getattr__(name: str) -> object:
    if name in _LIGHT:
        return _importlib.import_module(f"nanoengine.{name}")
    if name not in __all__:
        from nanoengine.api.known_imports import IMPORTS

        if name in IMPORTS:  # the text of an AttributeError would not be seen
            raise ImportError(f"{__name__!r} has no {name}; {IMPORTS[name].sentence}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nanoengine.devices.collector import paused

    with paused():
        places = (_HEAVY[name],) if name in _HEAVY else _LIGHT
        modules = [_importlib.import_module(f"nanoengine.{place}") for place in places]
    found: object = next(getattr(each, name) for each in modules if hasattr(each, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
