"""A model that is loaded in this process, as the server takes it. Imports PyTorch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nanoengine.api.async_llm import AsyncLLM
from nanoengine.api.llm import LLM
from nanoengine.serving.engine import Engine
from nanoengine.serving.prompts import Facts


@asynccontextmanager
async def connected(llm: AsyncLLM) -> AsyncIterator[tuple[Engine, Facts]]:
    """The engine and what a server must know of it. Raises InvalidPromptError if the model has no
    tokenizer.
    """
    yield llm, await llm.call(facts_of)


def facts_of(llm: LLM) -> Facts:
    """What a server must know of a model. Raises InvalidPromptError if it has no tokenizer."""
    engine, plan = llm.llm_engine, llm.plan
    return Facts(
        str(engine.config.model),
        llm.tokenizer,
        engine.inputs.default_params,
        plan.max_model_len,
        {
            "block_size": str(plan.kv.block_size),
            "num_gpu_blocks": str(plan.kv.num_blocks),
            "num_cpu_blocks": str(plan.kv.num_host_blocks),
            "max_model_len": str(plan.max_model_len),
        },
        engine.inputs.check_room,
    )
