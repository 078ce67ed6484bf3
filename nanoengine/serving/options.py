"""ServerOptions: how the server listens, whom it lets in and what it lets a client do."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address

from nanoengine.errors import MAX_COUNT, ConfigError, integer, number, shown
from nanoengine.text.reasoning import BY_NAME as REASONING_PARSERS
from nanoengine.text.tool_syntax import BY_NAME as TOOL_PARSERS

MAX_SECONDS = 86400.0
PREFIXES = ("nanoengine", "vllm")
API_KEY = "NANOENGINE_API_KEY"  # a variable of the environment
# Field -> what it is; --help shows it.
OPTIONS = {
    "host": "address to listen on; 0.0.0.0 lets other machines in",
    "port": "port; 0: any free one",
    "api_key": f"what clients must show as a bearer token; better in ${API_KEY}",
    "served_model_name": "name of the model in answers",
    "max_open_texts": "texts that are generated or wait; more get status 429",
    "queue_seconds": "longest wait for the first step, then status 503; 0: no limit",
    "drain_seconds": "what open requests get to end in at shutdown",
    "read_seconds": "what a client gets to send a body in",
    "stall_seconds": "how long a client may read nothing of an answer",
    "keep_alive_seconds": "a stream without a token for so long gets a comment",
    "idle_seconds": "a connection without a request for so long is closed",
    "max_body_mib": "largest body, MiB",
    "allow_origins": "a web page that may call, https://HOST or *; may be given again",
    "metrics_prefix": "of the names at /metrics: nanoengine or vllm",
    "tool_call_parser": "how the model writes calls of tools; its chat template shows it",
    "reasoning_parser": "how the model writes thoughts; its chat template shows it",
    "tokenizer_info": "show the chat template at /tokenizer_info",
    "engine_process": "run the engine in a process of its own, apart from HTTP and tokenising",
}
# Field -> smallest and largest value.
COUNTS = {"port": (0, 65535), "max_open_texts": (1, MAX_COUNT), "max_body_mib": (1, 1024)}
SECONDS = {
    "queue_seconds": (0.0, MAX_SECONDS),
    "drain_seconds": (0.0, MAX_SECONDS),
    "read_seconds": (0.1, MAX_SECONDS),
    "stall_seconds": (0.1, MAX_SECONDS),
    "keep_alive_seconds": (0.1, MAX_SECONDS),
    "idle_seconds": (1.0, MAX_SECONDS),
}


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What `nanoengine serve` takes beside the engine's settings; OPTIONS says what each field is.

    Raises ConfigError for a value out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str | None = None
    max_open_texts: int = 1024
    queue_seconds: float = 0.0
    drain_seconds: float = 6.0
    read_seconds: float = 60.0
    stall_seconds: float = 60.0
    keep_alive_seconds: float = 15.0
    idle_seconds: float = 75.0
    max_body_mib: int = 16
    allow_origins: tuple[str, ...] = ()
    metrics_prefix: str = "nanoengine"
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tokenizer_info: bool = False
    engine_process: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in COUNTS.items():
            whole = integer(getattr(self, name))
            if whole is None or not least <= whole <= most:
                raise _out_of_range(name, f"an integer from {least} to {most}", getattr(self, name))
        for name, (shortest, longest) in SECONDS.items():
            given = number(getattr(self, name))
            if given is None or not shortest <= given <= longest:
                raise _out_of_range(name, f"from {shortest:g} to {longest:g}", getattr(self, name))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ConfigError("api_key must be a non-empty text of ASCII characters")
        if self.metrics_prefix not in PREFIXES:
            raise _out_of_range("metrics_prefix", " or ".join(PREFIXES), self.metrics_prefix)
        for name, parsers in (
            ("tool_call_parser", TOOL_PARSERS),
            ("reasoning_parser", REASONING_PARSERS),
        ):
            given = getattr(self, name)
            if given is not None and given not in parsers:
                raise _out_of_range(name, f"one of {', '.join(parsers)}", given)

    @property
    def is_open(self) -> bool:
        """Whether other machines may call without a key."""
        return self.api_key is None and not self._is_loopback

    @property
    def is_for_this_machine(self) -> bool:
        """Whether the programs of this machine alone may call, without a key."""
        return self.api_key is None and self._is_loopback

    @property
    def _is_loopback(self) -> bool:
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


def _out_of_range(name: str, range_: str, given: object) -> ConfigError:
    return ConfigError(f"{name} must be {range_}, got {shown(given)}")
