"""Three chat questions in one batch, on whatever device is here. After `make demo`: python
example.py
"""

import time

from nanoengine import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of Japan?",
    "Write one sentence about the sea.",
    "List three fruits.",
)

with LLM("smollm2-135m") as llm:
    print(llm.plan, end="\n\n")
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    start = time.perf_counter()
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    finished = time.perf_counter()
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"\n> {question}\n{output.outputs[0].text.strip()}")
    first = max(output.metrics.first_token_time for output in outputs)
    num_in = sum(len(output.prompt_token_ids) for output in outputs)
    num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\nprompt       {num_in} tokens, {num_in / (first - start):.0f} tok/s")
    print(
        f"generation   {num_out} tokens, {(num_out - len(outputs)) / (finished - first):.0f} tok/s"
    )
    print(f"peak memory  {llm.llm_engine.device.peak_memory_mib():.0f} MiB")
