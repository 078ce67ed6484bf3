"""nanoengine.ray.Generate without Ray: batches as Ray Data gives them, dicts of numpy columns."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine import LLM, ConfigError, EngineClosedError, InvalidParamsError, SamplingParams
from nanoengine.ray import Generate
from nanoengine.sampling_params import seeded

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kvcache_block_size": 8,
    "num_gpu_blocks": 60,
    "num_threads": 1,
    "seed": 5,
}
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("threads_as_before")


def column(*values: Any) -> Any:
    """An object array, as Arrow's columns of texts, lists and structs become."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def run(generate: Generate, *batches: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers to batches that are all under way at once."""

    async def work() -> list[dict[str, Any]]:
        return await asyncio.wait_for(asyncio.gather(*map(generate, batches)), 60)

    return asyncio.run(work())


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    columns = (list(values) for values in batch.values())
    return [dict(zip(batch, values, strict=True)) for values in zip(*columns, strict=True)]


@pytest.fixture(scope="module")
def generate(tiny: Callable[[str], Path]) -> Iterator[Generate]:
    made = Generate(tiny("llama"), SAMPLED, seed_column="own_seed", **SETTINGS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **SETTINGS) as llm:
        yield llm


def batch(ids: Any, prompts: Any, seeds: Any = None) -> dict[str, Any]:
    own = column(*[None] * len(ids)) if seeds is None else seeds
    return {"id": np.array(ids), "prompt": prompts, "own_seed": own}


def test_rows_get_the_texts_of_one_process(generate: Generate, plain: LLM) -> None:
    """In other batches and another order, too: a seed comes from the row's id alone."""
    prompts = [f"row {number}" for number in range(12)]
    params = [seeded(SAMPLED, 5, str(number)) for number in range(12)]
    expected = plain.generate(prompts, params, use_tqdm=False)
    turned = list(reversed(range(12)))
    found = run(
        generate,
        *[batch(part, column(*[prompts[i] for i in part])) for part in (turned[:5], turned[5:])],
    )
    rows = {int(row["id"]): row for each in found for row in rows_of(each)}
    assert sorted(rows) == list(range(12))
    for number, output in enumerate(expected):
        row = rows[number]
        assert (row["text"], row["token_ids"]) == (output["text"], output["token_ids"])
        assert (row["finish_reason"], row["error"]) == ("length", "")
        assert row["prompt"] == prompts[number]
    assert len({row["text"] for row in rows.values()}) == 12


def test_a_bad_row_has_an_error_and_the_others_go_on(generate: Generate, plain: LLM) -> None:
    prompts = column("good", None, 7.5, "x" * 4000, np.array([1, 2, 3]), [], [1, -1], {"a": 1})
    (found,) = run(generate, batch(range(8), prompts))
    rows = rows_of(found)
    refused = [row["id"] for row in rows if row["error"]]
    assert refused == [1, 2, 3, 5, 6, 7]
    for number in refused:
        row = rows[number]
        assert (row["text"], row["token_ids"], row["finish_reason"]) == ("", [], "error")
    assert rows[1]["error"].startswith("InvalidPromptError: ") and "NoneType" in rows[1]["error"]
    assert rows[3]["error"].startswith("PromptTooLongError: ")
    expected = plain.generate([[1, 2, 3]], seeded(SAMPLED, 5, "4"), use_tqdm=False)
    assert rows[4]["text"] == expected[0]["text"]


@pytest.mark.parametrize(
    "prompt",
    [
        column({"role": "user", "content": "hello", "name": None}),
        {"prompt": None, "prompt_token_ids": np.array([1, 2, 3])},
        np.str_("a text"),
    ],
    ids=["conversation", "dict", "numpy's text"],
)
def test_prompts_as_arrow_gives_them(generate: Generate, prompt: Any) -> None:
    (found,) = run(generate, batch([1], column(prompt, None)[:1]))
    assert found["error"] == [""]
    assert len(found["token_ids"][0]) == 8


def test_token_ids_of_one_length_come_as_one_array(generate: Generate, plain: LLM) -> None:
    ids = np.array([[5, 6, 7], [8, 9, 10]])
    (found,) = run(generate, batch(["a", "b"], ids))
    params = [seeded(SAMPLED, 5, name) for name in "ab"]
    expected = plain.generate(ids.tolist(), params, use_tqdm=False)
    assert found["text"] == [output["text"] for output in expected]


def test_lists_are_given_back_as_lists(generate: Generate) -> None:
    """Ray takes arrays for tensors; those that are, and numbers, stay what they are."""
    image = np.zeros((2, 2))
    given = batch([1, 2], column(np.array([5, 6]), None)) | {"image": column(image, image)}
    (found,) = run(generate, given)
    assert found["prompt"] == [[5, 6], None] and type(found["prompt"][0]) is list
    assert found["image"][0] is image and found["id"] is given["id"]


def test_a_row_may_bring_its_seed(generate: Generate, plain: LLM) -> None:
    """A column with nulls holds floating numbers."""
    seeds = np.array([3.0, np.nan, 0.5, 3.0])
    (found,) = run(generate, batch([0, 1, 2, 3], column(*["same"] * 4), seeds))
    params = [SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3)]
    params.append(seeded(SAMPLED, 5, "1"))
    expected = plain.generate(["same"] * 2, params, use_tqdm=False)
    third, first = expected[0]["text"], expected[1]["text"]
    assert found["text"] == [third, first, "", third] and first != third
    assert found["error"][2].startswith("InvalidParamsError: seed")


@pytest.mark.parametrize("row_id", [None, 0.5, b"a", ["a"]])
def test_an_id_must_be_a_text_or_an_integer(generate: Generate, row_id: Any) -> None:
    ids = column(row_id, "fine")
    (found,) = run(generate, {"id": ids, "prompt": column("a", "b"), "own_seed": column(None, 2)})
    assert "the id of a row must be a text or an integer" in found["error"][0]
    assert found["finish_reason"] == ["error", "length"]


def test_columns_have_other_names_and_parameters_are_a_dict(tiny: Callable[[str], Path]) -> None:
    generate = Generate(
        tiny("llama"),
        {"temperature": 0, "max_tokens": 3},
        prompt_column="question",
        id_column="question",
        text_column="answer",
        **SETTINGS,
    )
    try:
        (found,) = run(generate, {"question": column("hello"), "text": column("kept")})
        assert list(found) == ["question", "text", "answer", "token_ids", "finish_reason", "error"]
        assert found["text"] == ["kept"] and len(found["token_ids"][0]) == 3
    finally:
        generate.close()


def test_without_parameters_the_models_own_hold(tiny: Callable[[str], Path]) -> None:
    generate = Generate(tiny("llama"), **SETTINGS)
    try:
        (found,) = run(generate, {"id": np.array([0]), "prompt": column("hello")})
        assert len(found["token_ids"][0]) <= 16 and found["error"] == [""]
    finally:
        generate.close()


def test_columns_that_lack_or_are_there_already(generate: Generate) -> None:
    with pytest.raises(ConfigError, match="no column 'own_seed', only"):
        run(generate, {"id": [1], "prompt": ["a"]})
    with pytest.raises(ConfigError, match="a column 'text' already; name the new one by text_"):
        run(generate, batch([1], column("a", "b")[:1]) | {"text": ["b"]})
    with pytest.raises(ConfigError, match="must be a dict of columns, got list"):
        run(generate, [1])  # type: ignore[arg-type]


def test_bad_arguments_end_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="two columns cannot both be 'text'"):
        Generate("nowhere", prompt_column="text")
    with pytest.raises(InvalidParamsError, match="n is 2; repeat the row"):
        Generate("nowhere", {"n": 2})
    with pytest.raises(InvalidParamsError, match="top_p"):
        Generate("nowhere", {"top_p": 3})
    with pytest.raises(ConfigError, match="num_gpu_block"):
        Generate("nowhere", num_gpu_block=3)  # type: ignore[call-arg]


def test_an_engine_that_ended_is_no_error_of_a_row(tiny: Callable[[str], Path]) -> None:
    """Ray must see it: the rows have no answer and are to be tried again."""
    generate = Generate(tiny("llama"), SAMPLED, **SETTINGS)
    generate.close()
    with pytest.raises(EngineClosedError):
        run(generate, {"id": [1], "prompt": ["a"]})


def test_the_file_imports_no_ray() -> None:
    program = "import sys, nanoengine.ray; assert not {'ray', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
