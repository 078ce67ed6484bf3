"""nanoengine batch: answers equal the library's, bad lines are errors, a kill loses nothing."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from nanoengine import LLM, SamplingParams
from nanoengine.api.streaming import DeltaStream
from nanoengine.cli.batch_files import AnswerFile
from nanoengine.cli.main import FAILED, INTERRUPTED, MISUSED, main
from nanoengine.engine import completion
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.output_processor import OutputProcessor
from nanoengine.errors import TransferError
from nanoengine.serving.openai_keys import CHAT, COMPLETIONS
from nanoengine.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
FLAGS = ["--num-threads", "1", "--dtype", "float32", "--kvcache-block-size", "16"]
SETTINGS = {"num_threads": 1, "dtype": "float32", "kvcache_block_size": 16}
MESSAGES = [{"role": "user", "content": "Häuser am Meer"}]
TALK = [*MESSAGES, {"role": "assistant", "content": "So"}]
OPEN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path]) -> Path:
    return tiny("qwen3")


def ask(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, rows: list[Any]) -> Path:
    texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def run(source: Path, target: Path, folder: Path, *flags: str, status: int = 0) -> None:
    argv = ["batch", str(source), str(target), "--model", str(folder), *FLAGS, *flags]
    assert main(argv) == status


def answers(target: Path) -> dict[str, dict[str, Any]]:
    """The lines by their custom_id; each is there once."""
    rows = [json.loads(row) for row in target.read_text().splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def texts(row: dict[str, Any]) -> list[str]:
    choices = row["response"]["body"]["choices"]
    return [each["text"] if "text" in each else each["message"]["content"] for each in choices]


def seed_of(custom_id: str, seed: int = 0) -> int:
    return xxhash.xxh3_64_intdigest(f"{seed}:{custom_id}".encode())


def test_answers_are_the_librarys(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(
        tmp_path / "in.jsonl",
        [
            ask("chat", CHAT, messages=MESSAGES, max_tokens=6, temperature=0, model="other"),
            ask("open", CHAT, messages=TALK, max_tokens=6, temperature=0, **OPEN),
            ask("ids", prompt=[5, 6, 7], max_tokens=5, temperature=0),
            ask("many", prompt=["The sea", "is"], n=2, max_tokens=5, seed=3),
            ask("drawn", prompt="The sea", max_tokens=5),
        ],
    )
    target = tmp_path / "out.jsonl"
    run(source, target, folder, "--seed", "9", "--json")
    out, err = capsys.readouterr()
    found, summary = answers(target), json.loads(out)
    assert "lines that name another model ('other') are answered by" in err
    greedy = SamplingParams(temperature=0, max_tokens=6)
    with LLM(folder, **SETTINGS) as llm:
        (chat,) = llm.chat(MESSAGES, greedy, use_tqdm=False)
        (goes_on,) = llm.chat(TALK, greedy, use_tqdm=False, **OPEN)
        (ids,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=5))
        params = SamplingParams(n=2, max_tokens=5, seed=3)
        many = llm.generate(["The sea", "is"], params, use_tqdm=False)
        params = SamplingParams(max_tokens=5, seed=seed_of("drawn", 9))
        (drawn,) = llm.generate(["The sea"], params, use_tqdm=False)
    assert texts(found["open"]) == [goes_on["text"]]
    assert texts(found["chat"]) == [chat["text"]] and texts(found["ids"]) == [ids["text"]]
    assert texts(found["many"]) == [made.text for each in many for made in each.outputs]
    assert texts(found["drawn"]) == [drawn["text"]]
    row = found["chat"]
    assert row["error"] is None and row["response"]["status_code"] == 200
    assert row["id"].startswith("batch_req_") and row["response"]["request_id"] == row["id"]
    body = row["response"]["body"]
    assert body["model"] == str(folder) and body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["prompt_tokens"] == len(chat.prompt_token_ids)
    assert (summary["requests"], summary["failed"], summary["resumed"]) == (5, 0, 0)
    assert summary["output_tokens"] == 6 + 6 + 5 + 20 + 5


def test_special_tokens_may_be_left_out(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "return_token_ids": True}
    rows = [ask("whole", **asked), ask("bare", **asked, add_special_tokens=False)]
    run(write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", tiny("llama"))
    found = answers(tmp_path / "out.jsonl")
    whole, bare = (
        found[name]["response"]["body"]["choices"][0]["prompt_token_ids"]
        for name in ("whole", "bare")
    )
    assert whole[1:] == bare and len(bare) == 1


def test_a_line_that_asks_for_more_than_the_context_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    rows = [
        ask("chat", CHAT, messages=MESSAGES, max_tokens=9999),
        ask("many", prompt=["a", [5] * 500], max_tokens=13),
        ask("full", prompt=[5] * 500, max_tokens=12, ignore_eos=True),
        ask("default", prompt=[5] * 500, ignore_eos=True),
    ]
    target = tmp_path / "out.jsonl"
    run(write(tmp_path / "in.jsonl", rows), target, folder, status=1)
    found = answers(target)
    for name in ("chat", "many"):
        assert found[name]["error"]["code"] == "context_length_exceeded"
    for name in ("full", "default"):
        assert found[name]["response"]["body"]["usage"]["completion_tokens"] == 12


def test_log_probabilities_are_the_librarys(folder: Path, tmp_path: Path) -> None:
    chat_asked = {"max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    rows = [
        ask("chat", CHAT, messages=MESSAGES, **chat_asked),
        ask("ids", prompt=[5, 6, 7], max_tokens=4, seed=1, logprobs=1),
        ask("echo", prompt=[5, 6, 7], max_tokens=1, temperature=0, logprobs=1, echo=True),
        ask("prompt", prompt="The sea", max_tokens=0, echo=True),
    ]
    target = tmp_path / "out.jsonl"
    run(write(tmp_path / "in.jsonl", rows), target, folder)
    choices = {name: row["response"]["body"]["choices"][0] for name, row in answers(target).items()}
    with LLM(folder, **SETTINGS) as llm:
        params = SamplingParams(max_tokens=4, temperature=0, logprobs=2)
        (chat,) = llm.chat(MESSAGES, params, use_tqdm=False)
        params = SamplingParams(max_tokens=4, seed=1, logprobs=1)
        (ids,) = llm.generate([5, 6, 7], params, use_tqdm=False)
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        (echo,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    scored = zip(chat["token_ids"], chat.outputs[0].logprobs or [], strict=True)
    content = choices["chat"]["logprobs"]["content"]
    wanted = [row[i].logprob for i, row in scored]
    assert [each["logprob"] for each in content] == pytest.approx(wanted, rel=1e-5)
    assert all(each["top_logprobs"][0]["logprob"] == each["logprob"] for each in content)
    assert [len(each["top_logprobs"]) for each in content] == [2] * 4
    joined = bytes(b for each in content for b in each["bytes"])
    assert joined.decode(errors="replace") == choices["chat"]["message"]["content"]
    found = choices["ids"]["logprobs"]
    wanted = [max(e.logprob for e in row.values()) for row in ids.outputs[0].logprobs or []]
    likeliest = [max(row.values()) for row in found["top_logprobs"]]
    assert likeliest == pytest.approx(wanted, rel=1e-5)
    assert len(found["tokens"]) == len(found["text_offset"]) == 4
    own, likeliest = (choices["echo"]["logprobs"][f"{name}_logprobs"] for name in ("token", "top"))
    scores = list(zip([6, 7], (echo.prompt_logprobs or [])[1:], strict=True))
    assert own[0] is None and likeliest[0] is None and len(own) == 4
    assert own[1:3] == pytest.approx([row[i].logprob for i, row in scores], rel=1e-5)
    # As lm-eval takes a token for the likeliest.
    assert [own[i] == max(likeliest[i].values()) for i in (1, 2, 3)] == [
        *(row[i].rank == 1 for i, row in scores),
        True,
    ]
    assert choices["echo"]["text"].endswith(echo["text"])
    assert choices["prompt"]["text"] == "The sea" and choices["prompt"]["logprobs"] is None


def test_a_bad_line_is_an_error_and_the_others_go_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}
    source = write(
        tmp_path / "in.jsonl",
        [
            "nonsense",
            ask("long", prompt="x" * 2000),
            ask("key", prompt="x", temprature=1),
            ask("tools", CHAT, messages=MESSAGES, tools=[{"type": "function"}]),
            ask("stream", CHAT, messages=MESSAGES, stream=True),
            ask("role", CHAT, messages=[{"content": "x"}]),
            ask("second", prompt=[[5], [10**6]]),
            ask("url", "/v1/embeddings", input="x"),
            ask("form", prompt="x", response_format=form),
            ask("good", prompt="x", max_tokens=2),
        ],
    )
    target = tmp_path / "out.jsonl"
    run(source, target, folder, status=FAILED)
    found = answers(target)
    assert found.pop("good")["error"] is None
    codes = {name: row["error"]["code"] for name, row in found.items()}
    assert codes == {
        None: "invalid_line",
        "long": "context_length_exceeded",
        "key": "unknown_parameter",
        "tools": "invalid_value",
        "stream": "unsupported_parameter",
        "role": "invalid_prompt",
        "second": "invalid_prompt",
        "url": "invalid_request",
        "form": "invalid_value",
    }
    assert found[None]["response"] is None
    response = found["key"]["response"]
    assert response["status_code"] == 400
    assert response["body"]["error"]["message"] == found["key"]["error"]["message"]
    assert "did you mean 'temperature'?" in found["key"]["error"]["message"]
    assert found["form"]["response"]["body"]["error"]["param"] == "response_format"
    said = capsys.readouterr().err
    assert "10 requests, 9 with an error" in said
    assert "the first error is of line 1: it is no JSON" in said


def test_a_path_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the model is looked for."""
    source = write(tmp_path / "in.jsonl", [ask("a", prompt="x")])
    (tmp_path / "link.jsonl").symlink_to(source)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for given, made, said in (
        ("in.jsonl", "-", "the output must be a file"),
        ("-", "out.jsonl", "the input must be a file"),
        ("in.jsonl", "./in.jsonl", "the output in.jsonl is the input itself; give a path"),
        ("in.jsonl", "link.jsonl", "the output link.jsonl is the input itself"),
        ("in.jsonl", ".", "the output . is a folder; give a file such as answers.jsonl"),
        ("in.jsonl", "pipe", "the output pipe is no file, and a batch reads what is there first"),
        ("in.jsonl", "/dev/full", "the output /dev/full is no file"),
        ("in.jsonl", "no/out.jsonl", "out.jsonl is in a folder that does not exist; give a file"),
        ("none.jsonl", "out.jsonl", "the input none.jsonl does not exist; check the path"),
        (".", "out.jsonl", "the input . is no file; check"),
    ):
        assert main(["batch", given, made, "--model", "no-such-model"]) == MISUSED
        assert said in capsys.readouterr().err
    there = sorted(path.name for path in tmp_path.iterdir())
    assert there == ["in.jsonl", "link.jsonl", "pipe"]


def test_ids_twice_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [ask("a", prompt="x"), ask("a", prompt="y")])
    target = tmp_path / "out.jsonl"
    run(source, target, Path("no-such-model"), status=FAILED)
    assert "lines 1 and 2 have the same custom_id 'a'" in capsys.readouterr().err
    assert not target.exists()
    assert main(["batch", str(source), str(target)]) == MISUSED
    assert "required: --model" in capsys.readouterr().err


def test_what_is_answered_is_not_asked_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [ask(f"{i}", prompt="The sea", max_tokens=4) for i in range(4)]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    run(source, target, folder, "--quiet")
    assert capsys.readouterr() == ("", "")
    before = target.read_bytes()
    run(source, target, Path("no-such-model"), "--json")  # nothing to load
    assert json.loads(capsys.readouterr().out)["resumed"] == 4
    write(source, [*rows, ask("new", prompt="x", max_tokens=2)])
    run(source, target, folder)
    assert target.read_bytes().startswith(before) and "new" in answers(target)
    assert "4 were answered before" in capsys.readouterr().err


def test_few_lines_are_open_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is kept full, and the rest of the file stays on disk."""
    most = 0
    expect = OutputProcessor.expect

    def count(self: OutputProcessor, seqs: Any) -> Any:
        nonlocal most
        made = expect(self, seqs)
        most = max(most, len(self._requests))
        return made

    monkeypatch.setattr(OutputProcessor, "expect", count)
    rows = [ask(f"{i}", prompt="x", max_tokens=1 + i % 5, ignore_eos=True) for i in range(30)]
    target = tmp_path / "out.jsonl"
    run(write(tmp_path / "in.jsonl", rows), target, folder, "--max-num-seqs", "3")
    assert most == 6 and len(answers(target)) == 30


def test_ctrl_c_says_how_to_go_on(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = LLMEngine.step

    def interrupt(self: LLMEngine) -> Any:
        if target.read_bytes():
            raise KeyboardInterrupt
        return step(self)

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, [ask(f"{n}", prompt="x", max_tokens=n, ignore_eos=True) for n in (2, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "step", interrupt)
        run(source, target, folder, status=INTERRUPTED)
    assert "stopped with 1 of 2 answered; the same command goes on" in capsys.readouterr().err
    run(source, target, folder)
    assert answers(target).keys() == {"2", "9"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_destructor_is_not_lost(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what a destructor raises, and each line's stream has one."""
    close, sent = DeltaStream.close, [signal.SIGINT]

    def interrupted(stream: DeltaStream) -> None:
        close(stream)
        if sent:
            signal.raise_signal(sent.pop())

    monkeypatch.setattr(DeltaStream, "__del__", interrupted)
    rows = [ask(f"c{i}", prompt=[5, 6], max_tokens=2) for i in range(9)]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    run(source, target, folder, "--quiet", "--max-num-seqs", "1", status=INTERRUPTED)
    assert not sent and 0 < len(answers(target)) < len(rows)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_request_that_fails_while_it_runs_is_a_servers_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text_after = completion.text_after

    def fail(tokenizer: Tokenizer, prompt: Any, ids: Any, *rest: Any) -> str:
        if len(ids) == 7:
            raise TransferError("its KV was lost")
        return text_after(tokenizer, prompt, ids, *rest)

    monkeypatch.setattr(completion, "text_after", fail)
    rows = [ask(f"{n}", prompt="x", max_tokens=n, ignore_eos=True) for n in (7, 8)]
    target = tmp_path / "out.jsonl"
    run(write(tmp_path / "in.jsonl", rows), target, folder, status=FAILED)
    found = answers(target)
    assert found["7"]["response"]["status_code"] == 500 and found["8"]["error"] is None
    assert found["7"]["error"] == {"code": "server_error", "message": "its KV was lost"}


def test_short_answers_do_not_wait_for_a_long_prompt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    step, add = LLMEngine.step, AnswerFile.add
    monkeypatch.setattr(LLMEngine, "step", lambda self: (events.append("step"), step(self))[1])
    monkeypatch.setattr(
        AnswerFile, "add", lambda self, line, *rest: (events.append("add"), add(self, line, *rest))
    )
    long = ask("long", prompt="x" * 400, max_tokens=1)
    short = [ask(f"{i}", prompt="x", max_tokens=2) for i in range(3)]
    limits = ["--max-num-batched-tokens", "16", "--max-num-seqs", "4"]
    source = write(tmp_path / "in.jsonl", [long, *short])
    run(source, tmp_path / "out.jsonl", folder, *limits)
    assert events.index("add") < 10 < events.count("step")


# Children of one process that has imported torch: a start of Python for each would take seconds.
CHILD = """
import os, sys, time
from pathlib import Path
from nanoengine.cli.main import main
from nanoengine.engine.llm_engine import LLMEngine
step = LLMEngine.step
def step_until(target, size):
    # Whoever is to be killed waits for it, however late it comes.
    def stepping(self):
        while target.exists() and target.stat().st_size >= size:
            time.sleep(0.001)
        return step(self)
    return stepping
for line in sys.stdin:
    child = os.fork()
    if not child:
        size, *arguments = line.split("\\t")[:-1]
        LLMEngine.step = step_until(Path(arguments[2]), float(size))
        os._exit(main(arguments))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.breadth
@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_killed_batch_goes_on_with_the_same_texts(
    num_kills: int, folder: Path, tmp_path: Path
) -> None:
    """Killed by SIGKILL when the output has reached random sizes."""
    limits = [{"max_tokens": 4 + i % 9, "ignore_eos": True} for i in range(24)]
    rows = [
        ask(f"line {i}", CHAT, messages=MESSAGES, **limit)
        if i % 2
        else ask(f"line {i}", prompt=f"The sea {i}", **limit)
        for i, limit in enumerate(limits)
    ]
    source = write(tmp_path / "in.jsonl", rows)
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    flags = [*FLAGS, "--max-num-seqs", "4", "--quiet"]
    draw = random.Random(num_kills)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None

        def begin(target: Path, size: float = math.inf) -> int:
            argv = ["batch", str(source), str(target), "--model", str(folder), *flags, ""]
            print("\t".join([str(size), *argv]), file=parent.stdin, flush=True)
            return int(parent.stdout.readline())

        def end() -> int:
            return int(parent.stdout.readline())

        begin(whole)
        assert end() == 0
        size = whole.stat().st_size
        statuses = []
        for wanted in sorted(draw.randrange(size * 4 // 5) for _ in range(num_kills)):
            child = begin(killed, wanted)
            while not killed.exists() or killed.stat().st_size < wanted:
                os.kill(child, 0)  # it has not ended
                time.sleep(0.001)
            os.kill(child, signal.SIGKILL)
            statuses.append(end())
        assert statuses == [-signal.SIGKILL] * num_kills
        begin(killed)
        assert end() == 0
        parent.stdin.close()
    found, expected = answers(killed), answers(whole)
    assert found.keys() == {row["custom_id"] for row in rows} == expected.keys()
    assert {name: texts(row) for name, row in found.items()} == {
        name: texts(row) for name, row in expected.items()
    }
