"""nanoengine: a small LLM inference engine whose context need not fit the device that runs it."""

from nanoengine.collector import paused as _paused

with _paused():
    from nanoengine.async_llm import AsyncLLM
    from nanoengine.errors import (
        ConfigError,
        EngineError,
        InvalidParamsError,
        InvalidPromptError,
        ModelLoadError,
        PromptTooLongError,
        RequestError,
    )
    from nanoengine.llm import LLM
    from nanoengine.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        RequestOutput,
    )
    from nanoengine.sampling_params import BeamSearchParams, SamplingParams
    from nanoengine.streaming import StreamDelta

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EngineError",
    "InvalidParamsError",
    "InvalidPromptError",
    "ModelLoadError",
    "PromptTooLongError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
]
