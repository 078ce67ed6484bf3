"""lm-eval's model type `nanoengine` against its own type `hf`, where lm-eval is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from nanoengine.bench.lm_eval_model import NanoengineLM
from nanoengine.errors import ConfigError, InvalidParamsError

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "measure_speed": False}
# One window of the reference holds as many tokens of a text as one of ours.
LENGTH, REFERENCE_LENGTH = 96, 94
PAIRS = [
    ("The sea is", " wide and cold"),
    ("The sea is ", "salt"),
    ("", "A text without a context"),
    ("<s>It begins with its own first token", ", and gets no other"),
    ("a" * 200, " has a context that loses its beginning"),
]
TEXTS = ["short", "A text of some words.", "It is longer than the window is. " * 12]
FREE = {"until": [], "max_gen_toks": 24}


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def models(request: Any, tiny: Callable[[str], Path]) -> Iterator[tuple[NanoengineLM, Any]]:
    """Ours and the reference: a tokenizer that adds a token of its own, and one that does not."""
    folder = str(tiny(request.param))
    reference = HFLM(folder, device="cpu", dtype="float32", max_length=REFERENCE_LENGTH)
    ours = NanoengineLM(folder, max_model_len=LENGTH, **SETTINGS)
    yield ours, reference
    ours.llm.close()


def test_log_likelihoods(models: Any) -> None:
    ours, reference = models
    # A continuation that is the model's own, so that each of its tokens is the likeliest.
    asked = [("The sea is", {"until": [], "max_gen_toks": 3})]
    (own,) = ours.generate_until(requests("generate_until", asked))
    pairs = PAIRS[:4] + ([("The sea is", own)] if own.isascii() else [])
    made = requests("loglikelihood", pairs)
    expected = reference.loglikelihood(made, disable_tqdm=True)
    for found, wanted in zip(ours.loglikelihood(made, True), expected, strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=1e-3) and found[1] == wanted[1]


def test_rolling_log_likelihoods(models: Any) -> None:
    ours, reference = models
    made = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    expected = reference.loglikelihood_rolling(made, disable_tqdm=True)
    assert ours.loglikelihood_rolling(made, True) == pytest.approx(expected, abs=1e-3)


def test_a_long_context_loses_its_beginning(models: Any) -> None:
    ours, _ = models
    context, continuation = PAIRS[4]
    ids = ours.tok_encode(context + continuation)[-(LENGTH - 1) :]
    num_tokens = len(ours.tok_encode(continuation, add_special_tokens=False))
    cut: Any = [(None, ids[:-num_tokens], ids[-num_tokens:])]
    found = ours.loglikelihood(requests("loglikelihood", [PAIRS[4]]), True)
    assert found == ours._loglikelihood_tokens(cut, True)


def test_answers(models: Any) -> None:
    ours, reference = models
    made = requests("generate_until", [("The sea is", FREE), ("One", FREE), ("b" * 300, FREE)])
    free = ours.generate_until(made, True)
    assert free[:2] == reference.generate_until(made[:2], True)
    assert free[2] == ours.generate_until(requests("generate_until", [("b" * 299, FREE)]), True)[0]
    stop = free[0][len(free[0]) // 2]
    stopped = requests("generate_until", [("The sea is", FREE | {"until": ["#" * 99, stop]})])
    assert ours.generate_until(stopped, True) == [free[0].partition(stop)[0]]
    assert stop in free[0]
    sampled = FREE | {"do_sample": True, "temperature": 1.0, "seed": 3}
    made = requests("generate_until", [("The sea is", sampled)] * 2)
    first, second = ours.generate_until(made, True)
    assert first == second != free[0]


def test_errors_name_the_next_step(models: Any) -> None:
    ours, _ = models
    with pytest.raises(InvalidParamsError, match="set a temperature"):
        ours.generate_until(requests("generate_until", [("One", {"do_sample": True})]), True)
    with pytest.raises(InvalidParamsError, match="top_q"):
        ours.generate_until(requests("generate_until", [("One", {"top_q": 1})]), True)
    with pytest.raises(ConfigError, match="max_model_len"):
        NanoengineLM("smollm2-135m", max_model_length=96)


def test_chats_are_transformers(models: Any) -> None:
    ours, reference = models
    chat = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(chat) == reference.apply_chat_template(chat)
    assert ours.chat_template(True) == reference.chat_template(True)
    begun = [*chat, {"role": "assistant", "content": "It is"}]
    opened = ours.apply_chat_template(begun, add_generation_prompt=False)
    assert opened == reference.apply_chat_template(begun, add_generation_prompt=False)


def test_the_command_knows_the_model_type(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    assert get_model("nanoengine") is NanoengineLM
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "nanoengine.bench.lm_eval", "run", "--model", "nanoengine"]
    command += ["--model_args", f"pretrained={tiny('llama')},num_threads=1"]
    command += ["--tasks", "nanoengine_facts", "--include_path", "benchmarks/lm_eval"]
    done = subprocess.run(
        [*command, "--limit", "2", "--output_path", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "nanoengine_facts" in done.stdout, done.stderr
    assert list(tmp_path.rglob("results_*.json"))
