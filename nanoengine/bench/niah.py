"""RULER's needle-in-a-haystack tasks: builds prompts offline, reads data files, scores answers.

Knows the model's tokenizer only, and no engine.

Tasks, and the six prompt strings below: NVIDIA RULER (arXiv 2404.06654,
https://github.com/NVIDIA/RULER), Copyright (c) 2024 NVIDIA CORPORATION, Apache License 2.0.
`mode` "nvidia" sizes the haystack and draws in the order of that repository, so a tokenizer without
special tokens gives the same samples; "lm-eval" sizes it and joins the answer prefix as
EleutherAI's lm-evaluation-harness does. Unlike both, a length that is too small raises an error
instead of an endless loop or a skipped sample, and prefix and special tokens count, too.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

from nanoengine.errors import ConfigError, InvalidPromptError, counted
from nanoengine.text.tokenizer import Tokenizer

TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all "
    "the special magic {type_needle_v} for {query} mentioned in the provided text?"
)
ANSWER_PREFIX = " The special magic {type_needle_v} for {query} mentioned in the provided text are"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
# For a single value RULER rewords the template with these pairs before it fills it.
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))

NUM_ANSWER_TOKENS = 128  # part of the length kept for the answer, and tokens generated
NUM_COPIED = 9  # values after the key of the induction task
CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True)
class NiahTask:
    """haystack: "noise" or other "needles". The other fields: how keys and values are drawn."""

    haystack: str
    keys: str
    values: str


NIAH_TASKS = {
    "niah_single_1": NiahTask("noise", "words", "numbers"),
    "niah_multikey_2": NiahTask("needles", "words", "numbers"),
    "niah_multikey_3": NiahTask("needles", "uuids", "uuids"),
}
INDUCTION = "induction"


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the texts that its answer must contain.

    depth: place of the answer in percent of the context (None: not found in a data file's input).
    length: the tokens of prompt and answer it was made for; an axis of the heat map.
    """

    index: int
    prompt_ids: list[int]
    outputs: list[str]
    depth: float | None
    length: int

    @property
    def digest(self) -> str:
        """16 hex digits that identify the prompt."""
        return hashlib.sha256(repr(self.prompt_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Turns a question and the beginning of its answer into token ids.

    "base": one text after the other. "chat": the question is the user's turn, and the prefix opens
    the assistant's. RULER's prefix begins with a space; lm-eval's is stripped, and joined by one
    space without a chat.
    """

    tokenizer: Tokenizer
    mode: str = "nvidia"
    template: str = "base"

    def ids(self, question: str, answer_prefix: str) -> list[int]:
        """Token ids of the prompt. Raises RequestError for a missing or failing chat template."""
        if self.mode == "lm-eval":
            space = " " if self.template == "base" else ""
            answer_prefix = space + answer_prefix.strip()
        if self.template == "base":
            return self.tokenizer.encode(question + answer_prefix)
        chat = self.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        return self.tokenizer.encode(chat + answer_prefix, add_special_tokens=False)


class Words(Sequence[str]):
    """wonderwords' adjective-noun pairs in sorted order, without making all 6 million of them.

    groups: adjectives whose pairs mix when sorted: "blue-..." and "blue-eyed-...". ends: of each
    group, how many pairs come up to its end.
    """

    def __init__(self) -> None:
        """Raises ConfigError when wonderwords is not installed."""
        self.nouns, adjectives = _word_list("nounlist.txt"), _word_list("adjectivelist.txt")
        self.groups: list[list[str]] = []
        for adjective in sorted(adjectives, key=lambda word: word + "-"):
            if self.groups and adjective.startswith(self.groups[-1][0] + "-"):
                self.groups[-1].append(adjective)
            else:
                self.groups.append([adjective])
        self.ends = list(accumulate(len(group) * len(self.nouns) for group in self.groups))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: Any) -> Any:
        at = bisect_right(self.ends, index)
        group = self.groups[at]
        offset = index - (self.ends[at] - len(group) * len(self.nouns))
        if len(group) == 1:
            return f"{group[0]}-{self.nouns[offset]}"
        return sorted(f"{adjective}-{noun}" for adjective in group for noun in self.nouns)[offset]


def _word_list(name: str) -> list[str]:
    try:
        text = (resources.files("wonderwords") / "assets" / name).read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ConfigError(
            "RULER draws its keys from the package wonderwords; pip install 'nanoengine[ruler]'"
        ) from error
    return sorted({line.strip() for line in text.splitlines()} - {""})


def singular(text: str) -> str:
    """RULER's wording of its template for a single value."""
    for old, new in SINGULAR:
        text = text.replace(old, new)
    return text


class NiahBuilder:
    """Draws the samples of one task, one after the other, from one seed."""

    def __init__(self, task: str, prompt_format: PromptFormat, length: int, seed: int) -> None:
        self._name, self._task = task, NIAH_TASKS[task]
        self._format = prompt_format
        self._length = length
        self._rng = random.Random(seed)
        self._words = Words() if self._task.keys == "words" else ()
        self._step = 25 if length >= 4096 else 5

    def samples(self, num_samples: int) -> list[Sample]:
        """Draw samples. Raises ConfigError if even the smallest haystack is too long."""
        lm_eval = self._format.mode == "lm-eval"
        num_lines = self._lines_of_lm_eval() if lm_eval else self._lines_of_nvidia()
        # The smallest haystack from which each mode can still go a step down.
        floor = 2 if lm_eval else self._step + 1
        return [self._fitting(index, num_lines, floor) for index in range(num_samples)]

    def _lines_of_nvidia(self) -> int:
        """The most lines that fit, by bisection up to three times an estimate."""
        tokens_per_line = self._num_tokens(self._step) / self._step
        low, best = self._step, self._step
        high = max(int(self._length / tokens_per_line * 3), 2 * self._step)
        while low <= high:
            middle = (low + high) // 2
            if self._num_tokens(middle) + NUM_ANSWER_TOKENS <= self._length:
                best, low = middle, middle + 1
            else:
                high = middle - 1
        return best

    def _lines_of_lm_eval(self) -> int:
        """Add steps until it is too long, then go one back. lm-eval counts no prefix."""
        num_lines, total = self._step, 0
        while total + NUM_ANSWER_TOKENS < self._length:
            question, _, answer, _ = self._draw(num_lines)
            total = len(self._format.tokenizer.encode(question + answer))
            if total + NUM_ANSWER_TOKENS > self._length:
                return max(1, num_lines - self._step)
            num_lines += self._step
        return num_lines

    def _num_tokens(self, num_lines: int) -> int:
        question, prefix, _, _ = self._draw(num_lines)
        return len(self._format.ids(question, prefix))

    def _fitting(self, index: int, num_lines: int, floor: int) -> Sample:
        """A sample of `num_lines` lines, or of fewer when an unlucky draw is too long."""
        while True:
            question, prefix, answer, depth = self._draw(num_lines)
            ids = self._format.ids(question, prefix)
            needed = len(ids) + NUM_ANSWER_TOKENS
            if needed <= self._length:
                return Sample(index, ids, [answer], depth, self._length)
            if num_lines < floor:
                raise ConfigError(
                    f"length {self._length} is too small for {self._name}: with the smallest "
                    f"haystack ({counted(num_lines, 'line')}) sample {index} needs {needed} "
                    f"tokens, {NUM_ANSWER_TOKENS} of them for the answer; raise --length"
                )
            num_lines = max(1, num_lines - self._step)

    def _draw(self, num_lines: int) -> tuple[str, str, str, float]:
        """Question, answer prefix, value and the needle's depth in percent, in RULER's order."""
        task, values = self._task, self._task.values
        key, value = self._random(task.keys), self._random(values)
        if task.haystack == "noise":
            lines = [NOISE] * num_lines
        else:
            lines = [self._needle() for _ in range(num_lines)]
        (at,) = self._rng.sample(range(num_lines), 1)
        lines.insert(at, NEEDLE.format(type_needle_v=values, key=key, value=value))
        self._rng.sample(range(1), 1)  # RULER draws which key to ask for; there is only one
        fields = {"type_needle_v": values[:-1], "query": key, "context": "\n".join(lines)}
        question = singular(TEMPLATE).format(**fields)
        prefix = singular(ANSWER_PREFIX).format(**fields)
        return question, prefix, value, round(100 * at / num_lines, 1)

    def _needle(self) -> str:
        key, value = self._random(self._task.keys), self._random(self._task.values)
        return NEEDLE.format(type_needle_v=self._task.values, key=key, value=value)

    def _random(self, kind: str) -> str:
        if kind == "words":
            word: str = self._rng.choice(self._words)
            return word
        if kind == "numbers":
            return str(self._rng.randint(10**6, 10**7 - 1))
        return str(uuid.UUID(int=self._rng.getrandbits(128), version=4))


def induction_samples(
    tokenizer: Tokenizer, length: int, num_samples: int, seed: int
) -> list[Sample]:
    """Prompts of random words that hold a key and nine values once, and the key again at the end.

    `length` counts the prompt and the nine values. Depths are spread evenly over the samples.
    Raises ConfigError unless the tokenizer has one token per word, and for a length under 32.
    """
    special = tokenizer.special_ids
    vocab = sorted(set(tokenizer.backend.get_vocab().values()) - special)
    words = tokenizer.decode(vocab).split()
    if len(words) != len(vocab) or tokenizer.encode(" ".join(words)) != vocab:
        raise ConfigError(
            f"--task {INDUCTION} needs a checkpoint whose tokens are words, as "
            "`python benchmarks/induction.py FOLDER` writes it"
        )
    if length < 32:
        raise ConfigError(f"length {length} is too small for {INDUCTION}; it needs at least 32")
    samples = []
    for index in range(num_samples):
        rng = random.Random(f"{seed} {index}")
        key, *rest = rng.sample(vocab, len(vocab))
        values, others = rest[:NUM_COPIED], rest[NUM_COPIED:]
        # The key is in the prompt twice; the values are in the context and in the answer.
        ids = rng.choices(others, k=length - 2 - 2 * NUM_COPIED)
        depth = 100 * (index + 0.5) / num_samples
        at = int(len(ids) * depth / 100)
        ids[at:at] = [key, *values]
        answer = tokenizer.decode(values)
        samples.append(Sample(index, [*ids, key], [answer], round(depth, 1), length))
    return samples


def read_samples(path: Path, prompt_format: PromptFormat) -> list[Sample]:
    """Samples of a RULER jsonl file: `input`, `outputs`, optional `answer_prefix` and `length`.

    RULER overwrites its `index` with a character offset, so a sample's index is its place in the
    file. Raises InvalidPromptError with the file and the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidPromptError(f"cannot read {path}: {error}") from error
    samples: list[Sample] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            samples.append(_sample_of(json.loads(line), len(samples), prompt_format))
        except (ValueError, RecursionError) as error:
            raise InvalidPromptError(f"{path}, line {number}: {error}") from error
    if not samples:
        raise InvalidPromptError(f"{path} holds no samples")
    return samples


def _sample_of(entry: Any, index: int, prompt_format: PromptFormat) -> Sample:
    """The sample of a file entry. Raises ValueError if it does not have RULER's format."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected a JSON object, got {type(entry).__name__}")
    question, outputs = entry.get("input"), entry.get("outputs")
    prefix, length = entry.get("answer_prefix", ""), entry.get("length")
    if not isinstance(question, str) or not question:
        raise ValueError(f'"input" must be a string, got {question!r}')
    if not isinstance(outputs, list) or not outputs:
        raise ValueError(f'"outputs" must be a list of answers, got {outputs!r}')
    if not all(isinstance(answer, str) and answer for answer in outputs):
        raise ValueError(f'"outputs" must hold strings, got {outputs!r}')
    if not isinstance(prefix, str):
        raise ValueError(f'"answer_prefix" must be a string, got {prefix!r}')
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f'"length" must be a number of tokens, got {length!r}')
    ids = prompt_format.ids(question, prefix)
    at = question.find(outputs[0])
    depth = None if at < 0 else round(100 * at / len(question), 1)
    return Sample(index, ids, outputs, depth, length or len(ids) + NUM_ANSWER_TOKENS)


def parse_indices(text: str | None, num_samples: int) -> list[int]:
    """ "0-2,7" as [0, 1, 2, 7], sorted, each once; None means all. Raises ConfigError."""
    if text is None:
        return list(range(num_samples))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f'--sample-indices must be like "0-19" or "0,3,7", got {text!r}')
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < num_samples:
            raise ConfigError(
                f"--sample-indices {part.strip()} is not within 0-{num_samples - 1}, the "
                f"{num_samples} samples there are"
            )
        chosen |= set(range(first, last + 1))
    return sorted(chosen)


def string_match_all(text: str, outputs: Sequence[str]) -> float:
    """RULER's score of one answer: the share of `outputs` found in it, ignoring case."""
    text = CONTROL_CHARACTERS.sub("\n", text.strip()).strip().lower()
    return sum(answer.lower() in text for answer in outputs) / len(outputs)


def exact_beginning(text: str, outputs: Sequence[str]) -> float:
    """1.0 if the words of the only output are the first words of the answer, else 0.0."""
    expected = outputs[0].split()
    return float(text.split()[: len(expected)] == expected)
