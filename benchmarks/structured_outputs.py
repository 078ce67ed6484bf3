"""Time per step with the mask of a JSON schema against without, both in turns:

    python -m benchmarks.structured_outputs [MODEL] [--batch 1 32] [--tokens 32] [--rounds 5]

Prints JSON: milliseconds of a decode step on both sides (medians, and the rounds' range), their
ratio, the seconds that the first request with a form waited for the vocabulary and the grammar, and
how many steps the tokens of objects with long names took: a form forces most of them.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

from nanoengine import LLM, SamplingParams

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}

LONG = {
    "type": "object",
    "properties": {
        "name_of_the_customer": {"type": "string", "maxLength": 20},
        "number_of_open_orders": {"type": "integer", "minimum": 0, "maximum": 99},
        "has_agreed_to_the_conditions": {"type": "boolean"},
        "preferred_way_of_payment": {"enum": ["card", "invoice", "bank transfer"]},
    },
    "required": [
        "name_of_the_customer",
        "number_of_open_orders",
        "has_agreed_to_the_conditions",
        "preferred_way_of_payment",
    ],
    "additionalProperties": False,
}


def steps(llm: LLM) -> dict[str, int]:
    """Tokens of 8 objects, and the steps in which they were sampled."""
    asked: dict[str, Any] = {"max_tokens": 200, "structured_outputs": {"json": LONG}}
    params = [SamplingParams(seed=seed, **asked) for seed in range(8)]
    outputs = llm.generate(["A customer as JSON: "] * len(params), params, use_tqdm=False)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    metrics = [output.metrics for output in outputs if output.metrics]
    return {
        "tokens": num_tokens,
        "steps": num_tokens - sum(each.num_accepted for each in metrics),
        "guessed": sum(each.num_guessed for each in metrics),
    }


def seconds(llm: LLM, batch: int, tokens: int, form: dict[str, Any] | None) -> float:
    """Of one decode step: longer answers less short ones, so that prompts do not count."""
    took = []
    for length in (2, 2 + tokens):
        params = SamplingParams(max_tokens=length, seed=1, ignore_eos=True, structured_outputs=form)
        begun = time.perf_counter()
        outputs = llm.generate(["People as JSON: "] * batch, params, use_tqdm=False)
        took.append(time.perf_counter() - begun)
        assert all(len(output.outputs[0].token_ids) == length for output in outputs)
    return (took[1] - took[0]) / tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    form = {"json": SCHEMA}
    with LLM(given.model, max_model_len=512, enable_prefix_caching=False) as llm:
        begun = time.perf_counter()
        llm.generate("a", SamplingParams(max_tokens=1, structured_outputs=form), use_tqdm=False)
        found: dict[str, Any] = {"first_request_s": round(time.perf_counter() - begun, 2)}
        found["long names"] = steps(llm)
        for batch in given.batch:
            sides: dict[str, list[float]] = {"without": [], "with": []}
            for _ in range(given.rounds):
                sides["without"].append(1e3 * seconds(llm, batch, given.tokens, None))
                sides["with"].append(1e3 * seconds(llm, batch, given.tokens, form))
            ratios = [b / a for a, b in zip(*sides.values(), strict=True)]
            found[f"batch {batch}"] = {
                **{f"{side}_ms": round(median(times), 2) for side, times in sides.items()},
                **{
                    f"{side}_range": [round(min(t), 2), round(max(t), 2)]
                    for side, t in sides.items()
                },
                "ratio": round(median(ratios), 3),
            }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
