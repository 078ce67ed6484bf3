"""Engine and TokenStream: what the server needs of an engine, wherever that runs.

AsyncLLM is one in this process; RemoteEngine is one in another. Imports no torch.
"""

from __future__ import annotations

from typing import Any, Protocol

from nanoengine.api.block_map import BlockMap
from nanoengine.api.stats import EngineStats
from nanoengine.outputs import RequestOutput, StreamDelta
from nanoengine.sampling_params import SamplingParams


class TokenStream(Protocol):
    """The output of one request; see AsyncDeltaStream."""

    output: RequestOutput | None
    error: Exception | None

    @property
    def is_queued(self) -> bool: ...
    def begun(self) -> RequestOutput: ...
    async def take(self) -> list[StreamDelta]: ...
    async def whole(self) -> RequestOutput: ...
    def fail(self, error: Exception) -> None: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """Answers prompts; see AsyncLLM."""

    async def stream(
        self, prompt: dict[str, Any], sampling_params: SamplingParams
    ) -> TokenStream: ...
    async def stats(self) -> EngineStats: ...
    async def block_map(self) -> BlockMap: ...
    async def check_health(self) -> None: ...
