"""What users call: LLM, and AsyncLLM for many concurrent callers on event loops of any thread.

LLM steps the engine while it waits for its own requests. Under AsyncLLM one thread owns the LLM and
is the only one to call it. Callers post functions that it runs between two steps. It puts new
output into a mailbox for each request and wakes the caller's loop. A slow caller finds all output
since its last read merged into one, so nothing waits for it or piles up.

Start with llm.py; then async_llm.py and engine_thread.py. May import engine, kv, text and devices.
"""
