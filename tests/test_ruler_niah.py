"""RULER needle in a haystack. As a script it runs the task that its options name (see --help):

    python tests/test_ruler_niah.py --length 4096 --enable-offload --offload-mode stream \
        --num-gpu-blocks 24 --max-num-seqs 8

Under pytest: samples equal to those of NVIDIA's own generator, data files, scores, the report, and
a short run on the constructed induction checkpoint, resident and streamed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As a script, it works from a checkout that is not installed.
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

from benchmarks.induction import write_checkpoint
from nanoengine.bench import heat_map, niah
from nanoengine.bench.niah import NiahBuilder, PromptFormat, Sample, read_samples
from nanoengine.bench.report import first_difference
from nanoengine.bench.ruler import compare, main
from nanoengine.errors import ConfigError, InvalidPromptError
from nanoengine.text.tokenizer import Tokenizer

TASKS = sorted(niah.NIAH_TASKS)
STREAM = ("--enable-offload", "--offload-mode", "stream", "--kv-offload-gib", "0.05")


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable[[str], Path]) -> Tokenizer:
    """One token a byte, and none added."""
    return Tokenizer.from_folder(tiny("qwen3"))


@pytest.fixture(scope="module")
def induction(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("induction"))


def build(tokenizer: Tokenizer, task: str, length: int, **settings: Any) -> list[Sample]:
    """Four samples of seed 42."""
    return NiahBuilder(task, PromptFormat(tokenizer, **settings), length, 42).samples(4)


# -- prompts


@pytest.mark.parametrize(
    ("text", "digest"),
    [
        (niah.TEMPLATE, "b373c00e238df12b"),
        (niah.ANSWER_PREFIX, "994f3a46e763414f"),
        (niah.NOISE, "c2fcf70de6081e6f"),
        (niah.NEEDLE, "8b1728a938426e42"),
    ],
)
def test_prompt_strings_are_rulers(text: str, digest: str) -> None:
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("task", "length", "digests"),
    [
        (
            "niah_single_1",
            4096,
            ["7a9e099468a2b138", "9b3f053853567636", "bf80740327a5defa", "6c4a879d7f9ed83e"],
        ),
        (
            "niah_multikey_2",
            8192,
            ["6d5c74cfc28d88fd", "44204c687a78ad49", "b2163ad3507d4602", "e28e441a3d0c753b"],
        ),
        (
            "niah_multikey_3",
            3000,
            ["aa01edf02bd2503a", "25087d055ffc5de6", "33255740bcc982bb", "0ec5ddbd4955b199"],
        ),
    ],
)
def test_samples_are_those_of_nvidias_generator(
    tokenizer: Tokenizer, task: str, length: int, digests: list[str]
) -> None:
    """The digests were made by scripts/data/synthetic/niah.py of NVIDIA/RULER, c3f5e3b, with this
    tokenizer; the third of niah_single_1 is one that it had to shorten."""
    assert [sample.digest for sample in build(tokenizer, task, length)] == digests


def test_words_are_the_sorted_pairs() -> None:
    words = niah.Words()
    assert len(words) == 6_171_620
    # Every boundary between two adjectives, and all of the adjectives that mix when sorted.
    ends = [0, *words.ends]
    boundaries = [i for end in ends[1:-1] for i in (end - 1, end)]
    mixed = [i for start, g in zip(ends, words.groups, strict=False) if len(g) > 1 for i in [start]]
    assert len(mixed) == 5
    probes = sorted({0, len(words) - 1, *boundaries, *(m + 6781 for m in mixed)})
    found = [words[i] for i in probes]
    assert found == sorted(set(found))
    group = next(g for g in words.groups if g[0] == "blue")
    start = ends[words.groups.index(group)]
    pairs = sorted(f"{a}-{n}" for a in ("blue", "blue-eyed") for n in words.nouns)
    assert [words[start + i] for i in range(0, len(pairs), 997)] == pairs[::997]


@pytest.mark.parametrize("mode", ["nvidia", "lm-eval"])
@pytest.mark.parametrize("template", ["base", "chat"])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_fit_their_length(
    tokenizer: Tokenizer, task: str, mode: str, template: str
) -> None:
    samples = build(tokenizer, task, 5000, mode=mode, template=template)
    needed = [len(sample.prompt_ids) + 128 for sample in samples]
    assert max(needed) <= 5000
    # A draw that is too long costs 25 lines, each of about 90 bytes; a needle of uuids has 133.
    assert max(needed) > 5000 - 26 * (133 if task == "niah_multikey_3" else 96)
    for sample in samples:
        text = tokenizer.decode(sample.prompt_ids)
        (value,) = sample.outputs
        assert text.count(value) == 1
        assert 0 <= sample.depth <= 100
        assert abs(100 * text.index(value) / len(text) - sample.depth) < 15


def test_how_the_answer_begins(tokenizer: Tokenizer) -> None:
    ends = {}
    for mode in ("nvidia", "lm-eval"):
        for template in ("base", "chat"):
            sample = build(tokenizer, "niah_single_1", 4096, mode=mode, template=template)[0]
            text = tokenizer.decode(sample.prompt_ids, skip_special_tokens=False)
            key = text.rpartition(" for ")[2].split(" ")[0]
            ends[mode, template] = text.rpartition("provided text?")[2].replace(key, "KEY")
            assert text.removeprefix("<|im_start|>user\n").startswith("A special magic number is")
            assert text.count(f"What is the special magic number for {key}") == 1
            assert text.count(f"One of the special magic numbers for {key} is: ") == 1
    answer = "The special magic number for KEY mentioned in the provided text is"
    opening = "<|im_end|>\n<|im_start|>assistant\n"
    assert ends == {
        ("nvidia", "base"): f" {answer}",
        ("nvidia", "chat"): f"{opening} {answer}",
        ("lm-eval", "base"): f" {answer}",
        ("lm-eval", "chat"): f"{opening}{answer}",
    }


def test_a_seed_gives_the_same_samples_however_many(tokenizer: Tokenizer) -> None:
    prompt_format = PromptFormat(tokenizer)
    few = NiahBuilder("niah_multikey_2", prompt_format, 3000, 42).samples(2)
    assert build(tokenizer, "niah_multikey_2", 3000)[:2] == few
    assert NiahBuilder("niah_multikey_2", prompt_format, 3000, 43).samples(2) != few


@pytest.mark.parametrize(
    ("mode", "length"),
    [("nvidia", n) for n in (1, 128, 200, 850)] + [("lm-eval", 1), ("lm-eval", 500)],
)
def test_a_length_that_is_too_small_is_an_error(
    tokenizer: Tokenizer, mode: str, length: int
) -> None:
    with pytest.raises(ConfigError, match=f"length {length} is too small .* needs .*raise"):
        build(tokenizer, "niah_single_1", length, mode=mode)


# -- data files


def test_a_data_file_is_read_as_it_stands(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [
        {
            "index": 51037,
            "input": "a 1234567 b?",
            "outputs": ["1234567"],
            "answer_prefix": " It is",
        },
        {"input": "c", "outputs": ["x", "y"], "length": 4096, "others": None},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\r\n", encoding="utf-8")
    first, second = read_samples(path, PromptFormat(tokenizer))
    assert tokenizer.decode(first.prompt_ids) == "a 1234567 b? It is"
    assert (first.index, first.outputs, first.depth) == (0, ["1234567"], 16.7)
    assert (second.index, second.outputs, second.depth, second.length) == (
        1,
        ["x", "y"],
        None,
        4096,
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "Expecting property name"),
        (b"\xff{}", "utf-8"),
        (b"[" * 100_000, "recursion"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"outputs": ["x"]}', '"input" must be a string'),
        (b'{"input": "a"}', '"outputs" must be a list'),
        (b'{"input": "a", "outputs": []}', '"outputs" must be a list'),
        (b'{"input": "a", "outputs": "x"}', '"outputs" must be a list'),
        (b'{"input": "a", "outputs": [7]}', '"outputs" must hold strings'),
        (b'{"input": "a", "outputs": [""]}', '"outputs" must hold strings'),
        (b'{"input": "a", "outputs": ["x"], "answer_prefix": 1}', '"answer_prefix" must be'),
        (b'{"input": "a", "outputs": ["x"], "length": "4k"}', '"length" must be'),
        (rb'{"input": "\ud800", "outputs": ["x"]}', "surrogate"),
    ],
)
def test_a_bad_line_is_named(tokenizer: Tokenizer, tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input": "a", "outputs": ["x"]}\n\n' + line + b"\n")
    with pytest.raises(InvalidPromptError) as error:
        read_samples(path, PromptFormat(tokenizer))
    assert f"{path}, line 3: " in str(error.value) and why in str(error.value)


def test_a_file_without_samples_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InvalidPromptError, match="holds no samples"):
        read_samples(tmp_path / "empty.jsonl", PromptFormat(tokenizer))
    with pytest.raises(InvalidPromptError, match="cannot read"):
        read_samples(tmp_path / "none.jsonl", PromptFormat(tokenizer))


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, list(range(10))), ("0-3", [0, 1, 2, 3]), ("7", [7]), ("9, 0-1,1", [0, 1, 9])],
)
def test_sample_indices(text: str | None, expected: list[int]) -> None:
    assert niah.parse_indices(text, 10) == expected


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "10", "0-10", "1,,2", "1 2"])
def test_bad_sample_indices(text: str) -> None:
    with pytest.raises(ConfigError, match="--sample-indices"):
        niah.parse_indices(text, 10)


# -- scores and comparison


@pytest.mark.parametrize(
    ("text", "outputs", "score"),
    [
        (" 1234567.", ["1234567"], 1.0),
        ("123456", ["1234567"], 0.0),
        ("An ABC here", ["abc"], 1.0),
        ("one and\x00three", ["one", "two", "three", "four"], 0.5),
        ("a\tb", ["a\nb"], 1.0),  # control characters count as line ends
        ("", ["x"], 0.0),
    ],
)
def test_string_match_all(text: str, outputs: list[str], score: float) -> None:
    assert niah.string_match_all(text, outputs) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("t005 t006 t007", 1.0),
        ("t005 t006", 1.0),
        ("t005", 0.0),
        ("t004 t005 t006", 0.0),
        ("", 0.0),
    ],
)
def test_exact_beginning(text: str, score: float) -> None:
    assert niah.exact_beginning(text, ["t005 t006"]) == score


def test_comparison_names_the_first_differing_token() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], None) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    here = [{"index": i, "text": t, "token_ids": [1, ord(t)]} for i, t in ((0, "a"), (3, "b"))]
    there = {3: {"index": 3, "text": "c", "token_ids": [1, 7]}}
    found = compare(here, there)
    assert (found["compared"], found["same_texts"]) == (1, 0)
    assert found["differing"][0]["first_differing_token"] == 1


# -- whole runs


def run(folder: Path, *options: str, status: int = 0) -> None:
    """The ninth token lies in another block than the first."""
    arguments = ["--model", str(folder), "--task", "induction", "--length", "1028"]
    sizes = ["--max-model-len", "1100", "--kvcache-block-size", "64", "--dtype", "float32"]
    assert main([*arguments, *sizes, "--num-samples", "6", *options]) == status


def test_streamed_and_resident_runs_agree(
    induction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resident, streamed = tmp_path / "resident.json", tmp_path / "streamed.json"
    run(induction, "--quiet", "--json", str(resident))
    assert capsys.readouterr().out.strip().endswith("score 100.00, 6 of 6 correct")
    small = ("--num-gpu-blocks", "8", "--max-num-seqs", "3")
    run(induction, *STREAM, *small, "--baseline", str(resident), "--json", str(streamed))
    out = capsys.readouterr().out
    assert "6 of 6 correct" in out and "baseline: 6 of 6 texts the same" in out
    assert "at most; 1.0 MiB are reserved for KV on the device, " in out
    report, before = (json.loads(path.read_text()) for path in (streamed, resident))
    assert report["transfers"]["h2d_bytes"] > 0 == before["transfers"]["h2d_bytes"]
    assert report["transfers"]["peak_streamed"] >= 1
    assert report["kv"]["device_bytes"] == 8 * 64 * 2 * 2 * 128 * 4
    assert report["baseline"]["differing"] == []
    for a, b in zip(report["samples"], before["samples"], strict=True):
        assert a["token_ids"] == b["token_ids"] and len(a["token_ids"]) == 9
        assert a["finish_reason"] == "length" and a["correct"] is True
        assert a["metrics"]["first_token_s"] > 0


def test_a_miss_is_told_and_fails(induction: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four tokens cannot hold nine values."""
    chosen = ("--sample-indices", "1,4", "--max-new-tokens", "4")
    run(induction, *chosen, status=1)
    out = capsys.readouterr().out
    assert "score 0.00, 0 of 2 correct" in out
    assert "MISS  sample 1, depth 25 %" in out and "MISS  sample 4, depth 75 %" in out
    run(induction, *chosen, "--min-score", "0", "--quiet")


def test_a_baseline_of_other_prompts_is_an_error(
    induction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    run(induction, "--quiet", "--json", str(path), "--sample-indices", "0", "--seed", "7")
    run(induction, "--baseline", str(path), status=2)
    assert "sample 0 has another prompt there" in capsys.readouterr().err
    path.write_text("{}")
    run(induction, "--baseline", str(path), status=2)
    assert "no report of this script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-gpu-blocks", "2"), "max_model_len=1100 needs 18 KV blocks"),
        (("--kv-offload-gib", "1"), "kv_offload_gib needs enable_cpu_offload"),
        (
            ("--length", "100,1200"),
            "--length 1200 is above the 1100 tokens that a request can have (max_model_len); lower",
        ),
        (("--length", "20"), "length 20 is too small"),
        (("--task", "niah_single_1", "--length", "200"), "length 200 is too small"),
        (("--data-file", "none.jsonl"), "cannot read none.jsonl"),
        (("--json", "no-such-folder/x.json"), "--json no-such-folder/x.json"),
        (("--template", "chat", "--task", "niah_single_1"), "no chat template"),
    ],
)
def test_what_cannot_run_says_why(
    induction: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    run(induction, *options, status=2)
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err


def test_several_lengths_run_at_once(
    induction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several, single = tmp_path / "several.json", tmp_path / "single.json"
    run(induction, "--length", "300, 100,300", "--num-samples", "3", "--json", str(several))
    out = capsys.readouterr().out
    assert "induction, lengths 300, 100: score 100.00, 6 of 6 correct\n" in out
    assert "  length 100: score 100.00, 3 of 3 correct\n" in out
    assert f"wrote the report {several}" in out
    report = json.loads(several.read_text())
    assert [s["index"] for s in report["samples"]] == [*range(6)]
    assert [s["length"] for s in report["samples"]] == [300] * 3 + [100] * 3
    assert [row["length"] for row in report["by_length"]] == [100, 300]
    run(induction, "--length", "300", "--num-samples", "3", "--quiet", "--json", str(single))
    alone = json.loads(single.read_text())["samples"]
    assert [s["text"] for s in report["samples"][:3]] == [s["text"] for s in alone]


@pytest.mark.parametrize("text", ["", "0", "4k", "1,,2", "-5", "1.5"])
def test_bad_lengths(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--length={text}"])
    assert "must be like 4096 or 1024,2048" in capsys.readouterr().err


def test_scores_are_means_of_cells_and_white_where_there_are_none() -> None:
    samples = [
        {"depth": depth, "length": length, "score": score}
        for depth, length, score in (
            *((0.0, 100, 1.0), (9.9, 100, 0.0), (10.0, 200, 0.5)),
            *((100.0, 200, 1.0), (None, 300, 0.0)),
        )
    ]
    lengths, grid = heat_map.scores(samples)
    assert lengths == [100, 200] and len(grid) == 10
    assert grid[0][0] == 50.0 and grid[1][1] == 50.0 and grid[9][1] == 100.0
    assert sum(math.isnan(value) for row in grid for value in row) == 17


@pytest.mark.parametrize(
    ("host", "ring", "text"),
    [
        (0, 0, "KV: 0.5 MiB on the device, no offload"),
        (1 << 30, 1 << 24, "KV: 0.5 MiB on the device, up to 1,024 MiB in RAM, streamed"),
        (1 << 30, 0, "KV: 0.5 MiB on the device, up to 1,024 MiB in RAM, read in place"),
    ],
)
def test_the_title_says_what_was_run(host: int, ring: int, text: str) -> None:
    prompts = {"mode": "nvidia", "template": "base"}
    report = {
        "settings": {"data_file": None, "task": "niah_single_1", "model": "models/smol"} | prompts,
        "kv": {"device_bytes": 1 << 19, "host_bytes": host, "ring_bytes": ring},
        "num_correct": 19,
        "num_samples": 20,
        "date": "2026-11-22",
    }
    what = "19 of n = 20 right, 2026-11-22"
    assert heat_map.title_lines(report) == [
        *("niah_single_1 (nvidia, base), model smol", text, what)
    ]


def test_plot_is_a_png(induction: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "map.png"
    run(induction, "--plot", str(path), "--length", "300,100")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"wrote the picture {path}" in capsys.readouterr().out


def test_help_shows_defaults_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "(default: smollm2-135m)" in out and "example: python tests/test_ruler_niah.py" in out


if __name__ == "__main__":
    sys.exit(main())
