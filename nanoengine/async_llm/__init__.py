"""AsyncLLM: one engine for many concurrent callers, on event loops of any thread.

One thread owns the LLM and is the only one to call it. Callers post functions that it runs between
two steps. It puts new output into a mailbox for each request and wakes the caller's loop. A slow
caller finds all output since its last read merged into one, so nothing waits for it or piles up.

Start with async_llm.py, then engine_thread.py. Imports llm.py, engine, text and devices.
"""

from nanoengine.async_llm.async_llm import AsyncLLM
from nanoengine.async_llm.delta_stream import AsyncDeltaStream

__all__ = ["AsyncDeltaStream", "AsyncLLM"]
