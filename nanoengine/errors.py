"""Every error nanoengine raises on purpose.

EngineError
├── ConfigError                 an engine setting is unknown, out of range or cannot be honoured
│   └── OutOfMemoryError        the KV budget or the weights do not fit
├── ModelLoadError              a model folder or file cannot be used
│   ├── ModelNotFoundError      nothing is there
│   ├── CorruptModelError       truncated or damaged file
│   ├── UnsupportedModelError   architecture, RoPE type or tensor type we do not know
│   └── WeightMismatchError     missing, unexpected or wrongly shaped tensors
├── RequestError                one request is wrong; every other request goes on
│   ├── InvalidParamsError      a sampling parameter is out of range
│   ├── InvalidPromptError      empty, of a wrong type, or a token id outside the vocabulary
│   ├── PromptTooLongError      could not finish even alone in an empty engine
│   ├── TransferError           a copy of its KV between device and host memory failed
│   └── LogitsError             the model computed logits that are no numbers
├── EngineClosedError           the engine was closed
└── ForkedProcessError          the engine, or its threads, belong to the process before a fork
"""


class EngineError(Exception):
    """Base of every error raised by nanoengine."""


class ConfigError(EngineError, ValueError):
    """An engine setting is unknown, out of range or cannot be honoured."""


class OutOfMemoryError(ConfigError):
    """The KV budget or the weights do not fit the memory they were given."""


class ModelLoadError(EngineError):
    """A model folder or file cannot be used."""


class ModelNotFoundError(ModelLoadError, FileNotFoundError):
    """No model is at the given place."""


class CorruptModelError(ModelLoadError):
    """A model file is truncated or damaged."""


class UnsupportedModelError(ModelLoadError):
    """The architecture, RoPE type or tensor type is not known."""


class WeightMismatchError(ModelLoadError):
    """The checkpoint's tensors are not the ones the architecture needs."""


class RequestError(EngineError, ValueError):
    """One request is wrong; every other request goes on."""


class InvalidParamsError(RequestError):
    """A sampling parameter is out of range."""


class InvalidPromptError(RequestError):
    """A prompt is empty, of a wrong type, or holds a token id outside the vocabulary."""


class PromptTooLongError(RequestError):
    """The request could not finish even alone in an empty engine."""


class TransferError(RequestError, RuntimeError):
    """A copy of the request's KV between device and host memory failed."""


class LogitsError(RequestError, ArithmeticError):
    """The model computed logits that are no numbers, or left no token to choose."""


class EngineClosedError(EngineError, RuntimeError):
    """The engine was closed."""


class ForkedProcessError(EngineError, RuntimeError):
    """The engine, or the threads that it needs, belong to the process that this one was forked
    from.
    """
