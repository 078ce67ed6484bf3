"""Structured outputs: texts have their form, and are what the model prefers among those that have.

Choices are compared with transformers' logits and a search by hand, JSON with jsonschema.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from checkpoints import reference, reference_logits
from driver import STREAMED, Driver, small_engine
from marks import named
from schemas import random_schema
from tiny_model import EOS_IDS

from nanoengine import LLM, SamplingParams, StructuredOutputsParams
from nanoengine.engine.draft_length import PayingDrafts
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.errors import InvalidParamsError, RequestError
from nanoengine.outputs import CompletionOutput
from nanoengine.sampling_params import MAX_CHOICES
from nanoengine.text import grammar
from nanoengine.text.tokenizer import Tokenizer

OFFLOAD = STREAMED | {"debug_kv": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "resident": {},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 5},
    "preempted": {"num_gpu_blocks": 20, "decode_reserve_blocks": 0},
    "run ahead": {"runs_ahead": True},
    "streamed": OFFLOAD,
    "in place": OFFLOAD | {"offload_mode": "in_place"},
    "guesses": {"speculative": "ngram:3"},
    "drafts": OFFLOAD | {"speculative": "resident:4", "max_num_seqs": 1},
}
PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for i in range(n)] for j, n in enumerate((120, 60, 9))]
# Long enough for guesses that fit, and some that go on where others end.
CHOICES = ("abababababababcd", "abababababababce", "abab", "bababababab", "bababababac", "é🙂")
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 999, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every streamed step drafts, whether it pays or not."""
    monkeypatch.setattr(PayingDrafts, "choose", lambda self: 4)


@functools.cache
def chosen(path: Path, prompt: tuple[int, ...]) -> list[int]:
    """Greedy among the bytes that lead to one of CHOICES, by transformers' logits."""
    tokenizer = Tokenizer.from_folder(path)
    texts = [tokenizer.encode(choice, add_special_tokens=False) for choice in CHOICES]
    made: list[int] = []
    while True:
        following = {text[len(made)] for text in texts if text[: len(made)] == made != text}
        allowed = [*following, *(EOS_IDS if made in texts else ())]
        if not following:
            return made
        logits = reference_logits(reference(path), [*prompt, *made])[-1]
        made.append(max(sorted(allowed), key=lambda i: float(logits[i])))
        if made[-1] in EOS_IDS:
            return made


def only(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    return Driver(engine).run([prompt], params)[0].outputs[0]


@pytest.mark.some(2)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_choices_are_those_of_transformers(tiny: Callable[[str], Path], layout: str) -> None:
    """Twice over one cache; once beside a request without a form, whose tokens stay as they are."""
    path = tiny("llama")
    engine = small_engine(path, **LAYOUTS[layout])
    form = StructuredOutputsParams(choice=CHOICES)
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    asked = SamplingParams(temperature=0, max_tokens=30, structured_outputs=form, logprobs=0)
    alone = only(engine, PROMPTS[0], free)
    for beside in ([PROMPTS[0]], []):
        params = [asked] * 3 + [free] * len(beside)
        outputs = Driver(engine).run([*PROMPTS, *beside], params)
        for prompt, output in zip(PROMPTS, outputs[:3], strict=True):
            made, right = output.outputs[0], chosen(path, tuple(prompt))
            assert made.token_ids == right and made.finish_reason == "stop"
            assert made.text in CHOICES and made.stop_reason is None
        assert all(output.outputs[0].token_ids == alone.token_ids for output in outputs[3:])
    if layout in ("guesses", "drafts"):
        assert sum(output.metrics.num_accepted for output in outputs)
    engine.close()


@pytest.fixture(scope="module")
def llm(tiny: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(tiny("llama"), dtype="float32", num_gpu_blocks=200, kvcache_block_size=8) as made:
        yield made


def check_schemas(llm: LLM, seeds: range) -> None:
    """Texts that ended by themselves are valid; a few of a random model's are too long."""
    accepted, params = [], []
    for seed in seeds:
        schema, draw = random_schema(seed), SamplingParams(max_tokens=250, seed=seed)
        try:
            made = SamplingParams(
                max_tokens=250, seed=seed, temperature=1.3, structured_outputs={"json": schema}
            )
            llm.llm_engine.inputs.grammars.state_of(made.form)
        except InvalidParamsError as error:
            assert re.match("structured_outputs: json: ", str(error)), (schema, draw)
            continue
        accepted.append(schema)
        params.append(made)
    assert len(accepted) >= 0.9 * len(seeds)
    outputs = llm.generate(["An answer: "] * len(params), params, use_tqdm=False)
    ended = [output.outputs[0].finish_reason for output in outputs]
    assert set(ended) <= {"stop", "length"} and ended.count("stop") >= 0.8 * len(ended)
    for schema, output in zip(accepted, outputs, strict=True):
        if output.outputs[0].finish_reason == "stop":
            value = json.loads(output.outputs[0].text)
            jsonschema.validate(
                value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )


def test_formats_that_json_schema_does_not_define_are_notes(llm: LLM) -> None:
    """And what looks like one within a value, or is the name of a member, stays."""
    secret = {"type": "string", "format": "password", "maxLength": 3}
    members = {
        "format": {"$ref": "#/$defs/secret"},
        "const": {"anyOf": [{"type": "integer", "format": "int32", "maximum": 9}]},
        "days": {"type": "array", "maxItems": 1, "items": {"type": "string", "format": "date"}},
        "fixed": {"const": {"format": "path"}},
    }
    schema = OBJECT | {"properties": members, "required": [*members], "$defs": {"secret": secret}}
    form = StructuredOutputsParams(json=schema)
    grammars = llm.llm_engine.inputs.grammars
    assert grammars is not None
    start = '{"format": "abc", "const": 5, "days": ["2024-01-31"], "fixed": {"format": "path"}}'
    for text, num_fit in (
        (start, len(start) - 1),
        (start.replace("-31", "-41"), start.index("31")),
    ):
        ids = tuple(llm.tokenizer.encode(text, add_special_tokens=False))
        assert len(ids) == len(text) and len(grammars.state_of(form).masks(ids)) - 1 == num_fit


NAMES = r'^[^\\/:*?"<>|]+$'
CLASSES: list[tuple[str, str, bool]] = [
    ('^[^"]*$', 'a"b', False),
    ('^[^"]*$', "a\\b\n\x01\u00e9", True),
    (r"^[^\\]*$", "a\\b", False),
    (r"^[^\\]*$", 'a"b', True),
    (NAMES, "a.txt", True),
    *((NAMES, f"a{mark}b", False) for mark in '"\\/?'),
    (r'^([^"]|x){2}$', 'a"', False),
    ("^[^!-/]+$", 'a"', False),
    (r"^[^\]]+[\[]$", "ab[", True),
    (r"^[^\]]+[\[]$", "a][", False),
    ("^[a^]+$", "a^", True),
    (r"^\[\^b]$", "[^b]", True),
]


@pytest.mark.parametrize(("pattern", "value", "fits"), CLASSES)
@pytest.mark.parametrize("is_key", [False, True])
def test_a_class_allows_no_more_than_it_says(
    llm: LLM, pattern: str, value: str, fits: bool, is_key: bool
) -> None:
    """In JSON some characters are written as two."""
    assert bool(re.search(pattern, value)) == fits
    schema = {"type": "string", "pattern": pattern}
    if is_key:
        only = {"patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
        schema = {"type": "object", "minProperties": 1} | only
    text = json.dumps({value: None} if is_key else value, ensure_ascii=False)
    ids = tuple(llm.tokenizer.encode(text, add_special_tokens=False))
    grammars = llm.llm_engine.inputs.grammars
    assert grammars is not None
    state = grammars.state_of(StructuredOutputsParams(json=schema))
    num_fit = 0
    for token_id in ids:
        if not state.masks(())[0][token_id >> 3] >> (token_id & 7) & 1:
            break
        num_fit += 1
        if state.accept(token_id):
            break
    assert (num_fit == len(ids)) == fits


def test_json_is_valid(llm: LLM) -> None:
    check_schemas(llm, range(20))


@pytest.mark.parametrize("liked", ["\n", " "], ids=["line", "space"])
def test_a_model_that_likes_white_space_writes_little_of_it(llm: LLM, liked: str) -> None:
    """Where it may, it writes `liked`, and nothing else between the parts: each time once."""
    tokens = {text: llm.get_tokenizer().encode(text, add_special_tokens=False) for text in "\n\t "}
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        logit_bias={ids[0]: 100.0 if text == liked else -100.0 for text, ids in tokens.items()},
        structured_outputs=StructuredOutputsParams(json=OBJECT),
    )
    output = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0]
    assert re.fullmatch(r'{g"a"g:g\d+g}'.replace("g", liked), output.text), output.text
    assert output.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_json_of_many_schemas_is_valid(llm: LLM, first: int) -> None:
    check_schemas(llm, range(first, first + 100))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-(ab|é)+"}, "[0-9]{3}-(ab|é)+"),
        ({"grammar": 'start: "a" b "."\nb: "x" | "(" b ")"'}, r"a\(*x\)*\."),
        ({"grammar": 'root ::= "a" ("b" | "c")+ "."'}, r"a[bc]+\."),
        (
            {"grammar": r'root ::= [\u00e0-\u00ff]{2} "\u00e9\\u00e9" "\U0001F600" "\x41"'},
            r"[à-ÿ]{2}é\\u00e9\U0001F600A",
        ),
        (
            {"choice": ['"quoted"\\', "two\nlines\t", "/a/ | b"]},
            r'"quoted"\\|two\nlines\t|/a/ \| b',
        ),
        ({"json_object": True}, r"\{.*"),
        ({"json": {}}, ".*"),
    ],
)
def test_a_text_has_its_form(llm: LLM, form: dict[str, Any], pattern: str) -> None:
    params = SamplingParams(max_tokens=60, n=6, seed=3, structured_outputs=form)
    (output,) = llm.generate("x", params, use_tqdm=False)
    ended = [made for made in output.outputs if made.finish_reason == "stop"]
    for made in ended:
        assert re.fullmatch(pattern, made.text, re.DOTALL), made.text
        if pattern in (r"\{.*", ".*"):
            json.loads(made.text)
    assert ended or "json" in next(iter(form))


def test_there_may_be_as_many_choices_as_it_says(llm: LLM) -> None:
    choices = [f"number {number}" for number in range(MAX_CHOICES)]
    asked = SamplingParams(max_tokens=20, seed=3, structured_outputs={"choice": choices})
    (output,) = llm.generate("x", asked, use_tqdm=False)
    assert output.error is None and output.outputs[0].text in choices


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": ["<s>a</s>"]}, "<s>a</s>"),
        ({"regex": r"<s>/\."}, "<s>/."),
        ({"json": {"enum": ["<s>"]}}, '"<s>"'),
        ({"grammar": 'root ::= "<s>" "a"'}, "<s>a"),
        ({"grammar": 'start: "a" "</s>"'}, "a</s>"),
    ],
)
def test_a_form_may_have_the_text_of_a_special_token(
    llm: LLM, form: dict[str, Any], text: str
) -> None:
    """As text: the token itself is none."""
    assert len(llm.tokenizer.encode("<s></s>", add_special_tokens=False)) == 2
    params = SamplingParams(max_tokens=20, structured_outputs=form)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert output.error is None and output.outputs[0].text == text
    assert llm.tokenizer.special_ids.isdisjoint(output.outputs[0].token_ids[: len(text)])


def test_completions_and_seeds_are_those_of_single_requests(
    tiny: Callable[[str], Path], llm: LLM
) -> None:
    """And log-probabilities are the model's own, which know no form."""
    asked: dict[str, Any] = {"max_tokens": 30, "structured_outputs": {"choice": CHOICES}}
    (whole,) = llm.generate("x", SamplingParams(n=5, seed=4, logprobs=2, **asked), use_tqdm=False)
    for index, made in enumerate(whole.outputs):
        (single,) = llm.generate("x", SamplingParams(seed=4 + index, **asked), use_tqdm=False)
        assert single.outputs[0].token_ids == made.token_ids
    assert len({made.text for made in whole.outputs}) > 1
    logits = reference_logits(reference(tiny("llama")), whole.prompt_token_ids)[-1]
    first = whole.outputs[0]
    own = torch.log_softmax(logits, 0)[first.token_ids[0]]
    assert first.logprobs[0][first.token_ids[0]].logprob == pytest.approx(float(own), abs=1e-4)


def test_other_ends_still_end(llm: LLM) -> None:
    """A stop string, max_tokens; an end-of-sequence token only where the text may end."""
    repeated: dict[str, Any] = {"temperature": 0, "structured_outputs": {"regex": "(ab){4,}"}}
    (stopped, cut, ignored) = llm.generate(
        ["x"] * 3,
        [
            SamplingParams(max_tokens=50, stop="aba", **repeated),
            SamplingParams(max_tokens=5, **repeated),
            SamplingParams(max_tokens=50, ignore_eos=True, min_tokens=8, **repeated),
        ],
        use_tqdm=False,
    )
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("", "aba")
    assert (cut.outputs[0].text, cut.outputs[0].finish_reason) == ("ababa", "length")
    assert re.fullmatch("(ab){4,}", ignored.outputs[0].text)


def test_a_stream_has_the_same_text_and_leaves_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"choice": CHOICES})
    (whole,) = llm.generate("x", params, use_tqdm=False)
    assert "".join(llm.stream("x", params)) == whole.outputs[0].text
    state = llm.llm_engine.add_stream("x", params)
    llm.llm_engine.step()
    assert state.seqs[0].grammar is not None
    llm.llm_engine.abort(state.request_id)
    assert state.seqs[0].grammar is None


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json": {}, "regex": "a"}, "exactly one of .*, got json and regex"),
        ({"jsn": {}}, "did you mean 'json'"),
        ({"json": "{"}, "json is no JSON schema: Expecting"),
        ({"json": "[]"}, r"json is no JSON schema: \[\] is no object"),
        ({"json": {"enum": [float("nan")]}}, "no JSON schema: Out of range float"),
        ({"json": {"enum": [{1}]}}, "no JSON schema: .*set"),
        ({"json": 5}, "json must be a JSON schema"),
        ({"regex": ""}, "regex must be a text that is not empty, got ''"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"choice": []}, "choice must be a list of 1 to 4096 texts"),
        ({"choice": ["a", ""]}, "choice must be a list of 1 to 4096 texts"),
        ({"grammar": "x" * 65537}, "has 65537 bytes, and may have 65536"),
        ({"json_object": 1}, "json_object must be True or False"),
        ("json", "structured_outputs must be a StructuredOutputsParams"),
    ],
)
def test_a_form_that_is_none_is_refused(form: Any, words: str) -> None:
    with pytest.raises(InvalidParamsError, match=words):
        SamplingParams(structured_outputs=form)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "banana"}}, "json: .*banana"),
        ({"json": {"not": {}}}, 'json: Unimplemented keys: \\["not"\\]'),
        ({"json": {"type": "string", "format": "regex"}}, "json: Unknown format: regex"),
        ({"json": {"minimum": 3, "maximum": 1, "type": "integer"}}, "json: Unsatisfiable schema"),
        (
            {"json": functools.reduce(lambda s, _: {"items": s}, range(200), {})},
            "json: recursion limit",
        ),
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"regex": "a(?=b)"}, "regex: .*look-around"),
        ({"grammar": "start: b"}, "grammar: .*unknown name"),
        ({"grammar": "start: " + "(" * 3000}, "grammar: .*nested"),
    ],
)
def test_a_grammar_that_is_none_is_refused(llm: LLM, form: dict[str, Any], words: str) -> None:
    params = SamplingParams(structured_outputs=form)
    with pytest.raises(InvalidParamsError, match=f"structured_outputs: {words}"):
        llm.generate("x", params)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"json": {"type": "integer", "multipleOf": 999983}}, r"json: not compiled within 0\.5 s"),
        (
            {
                "json": {
                    "allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrst"]
                }
            },
            "json: (not compiled within|its compiler ended)",
        ),
        ({"json": {"$ref": "#"}}, "json: no text fits it"),
        ({"json": {"allOf": [{"$ref": "#"}]}}, "json: no text fits it"),
        ({"grammar": "start: a\na: a"}, "grammar: "),
    ],
)
def test_a_hostile_form_is_refused_in_bounded_time(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any], words: str
) -> None:
    """And the next form is compiled."""
    made = grammar.Grammars(llm.tokenizer, 260, EOS_IDS)
    made.state_of(StructuredOutputsParams(regex="a"))  # the process has started
    begun = time.monotonic()
    with monkeypatch.context() as patch:
        if "not compiled" in words:
            patch.setattr(grammar, "COMPILE_SECONDS", 0.5)
            patch.setattr(made._process, "_seconds", 0.5)
        with pytest.raises(InvalidParamsError, match=f"structured_outputs: {words}"):
            made.state_of(StructuredOutputsParams(**form))
    assert time.monotonic() - begun < 60
    assert len(made.state_of(StructuredOutputsParams(regex="b")).masks(())) == 1


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(llm: LLM) -> None:
    heavy = {"regex": "((a{1,100}){1,100}){50}"}
    params = SamplingParams(max_tokens=60, structured_outputs=heavy)
    light = SamplingParams(max_tokens=30, temperature=0, structured_outputs={"choice": CHOICES})
    failed, other = llm.generate(["x", "x"], [params, light], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error" and isinstance(failed.error, RequestError)
    assert "structured_outputs asks: lexer error" in str(failed.error)
    assert other.outputs[0].text in CHOICES


def test_grammars_are_kept_up_to_a_limit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = llm.llm_engine.inputs
    made = grammar.Grammars(llm.tokenizer, 260, EOS_IDS)
    compiled: list[tuple[str, str]] = []
    whole = made._compile
    monkeypatch.setattr(made, "_compile", lambda source: compiled.append(source) or whole(source))
    monkeypatch.setattr(grammar, "MAX_CACHED", 3 * grammar.ENTRY + 10)
    forms = [StructuredOutputsParams(regex=letter) for letter in "abcd"]
    for form in (*forms[:3], forms[0], forms[3], forms[0], forms[1]):
        made.state_of(form)
    assert [text for _, text in compiled] == ["a", "b", "c", "d", "b"]
    assert inputs.grammars is inputs.grammars


def test_who_cannot_have_a_form(tiny: Callable[[str], Path], llm: LLM) -> None:
    with pytest.raises(InvalidParamsError, match="unknown parameter 'structured_outputs'"):
        llm.beam_search("x", beam_width=2, max_tokens=4, structured_outputs={"regex": "a"})
    engine = small_engine(tiny("llama"), num_gpu_blocks=16)
    engine.inputs._tokenizer = None
    with pytest.raises(InvalidParamsError, match="structured_outputs needs a tokenizer"):
        engine.add_request([5], SamplingParams(structured_outputs={"json": OBJECT}))
    engine.close()


KEYS = {
    "type": "object",
    "properties": {
        "name_of_the_city": {"enum": ["Paris", "Parma"]},
        "number_of_days": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name_of_the_city", "number_of_days"],
    "additionalProperties": False,
}


@pytest.mark.some(1)
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("layout", named({name: name for name in LAYOUTS}, "resident", "streamed"))
def test_forced_tokens_take_no_step_of_their_own(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """And change nothing: ids, log-probabilities, and where a text ends."""
    form: dict[str, Any] = {"max_tokens": 90, "structured_outputs": {"json": KEYS}}
    each = [
        SamplingParams(temperature=0, logprobs=1, **form),
        SamplingParams(seed=5, n=2, **form),
        SamplingParams(seed=6, stop="_of_days", **form | {"max_tokens": 80}),
        SamplingParams(seed=7, **form | {"max_tokens": 12}),
        SamplingParams(seed=8, repetition_penalty=1.3, **form),
    ]
    engine = small_engine(tiny("llama"), **LAYOUTS[layout])
    found: list[Any] = []
    scores, num_steps = [], []
    for forced in (grammar.GrammarState.forced, lambda state: ()):
        monkeypatch.setattr(grammar.GrammarState, "forced", forced)
        driver = Driver(engine)
        outputs = driver.run([PROMPTS[2]] * len(each), each)
        made = [each for output in outputs for each in output.outputs]
        found.append([(each.token_ids, each.text, each.finish_reason) for each in made])
        own = zip(made[0].token_ids, made[0].logprobs or (), strict=True)
        scores.append([entry[token_id].logprob for token_id, entry in own])
        driver = Driver(engine)
        (alone,) = driver.run([PROMPTS[2]], each[0])
        num_steps.append(driver.num_steps)
        guessed = [output.metrics.num_guessed > 0 for output in outputs]
        is_tight = layout == "chunked"  # most steps are full without guesses
        assert len(found) == 2 or (any(guessed) if is_tight else all(guessed))
    assert found[0] == found[1] and found[0][3][2] == "stop"
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    jsonschema.validate(json.loads(alone.outputs[0].text), KEYS)
    if layout not in ("guesses", "drafts"):  # which find the same
        assert num_steps[0] <= num_steps[1] - 30
    engine.close()


def test_guesses_that_a_form_allows_are_checked(tiny: Callable[[str], Path]) -> None:
    """Two letters may come at every place: many guesses fit the form and are wrong."""
    form = {"regex": "[ab]{60}"}
    each = [SamplingParams(max_tokens=60, seed=n, structured_outputs=form) for n in range(3)]
    found = []
    for speculative in (None, "ngram:4"):
        engine = small_engine(tiny("llama"), speculative=speculative)
        outputs = Driver(engine).run([PROMPTS[2]] * len(each), each)
        found.append([output.outputs[0].token_ids for output in outputs])
        engine.close()
    assert found[0] == found[1]
    guessed, right = (
        sum(getattr(output.metrics, name) for output in outputs)
        for name in ("num_guessed", "num_accepted")
    )
    assert 0 < right < guessed


@pytest.mark.parametrize("speculative", [None, "ngram:4"])
def test_tokens_are_forced_where_a_state_is_kept(
    tiny: Callable[[str], Path], speculative: str | None
) -> None:
    """A recurrent state cannot be cut."""
    params = SamplingParams(max_tokens=70, structured_outputs={"regex": "(a long text){4}"})
    engine = small_engine(tiny("qwen3.5"), speculative=speculative)
    (output,) = Driver(engine).run([PROMPTS[2]], params)
    assert (output.metrics.num_guessed > 0) == (speculative is not None)
    assert output.outputs[0].text.startswith("a long texta long text")
    engine.close()


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"bad_words": "b"}, "structured_outputs with bad_words leave"),
        ({"min_tokens": 3, "stop_token_ids": [68]}, "with min_tokens leave"),
        ({"min_tokens": 2, "bad_words": "b"}, "with bad_words and min_tokens leave"),
        ({"allowed_token_ids": [69, 70]}, "with allowed_token_ids leave"),
    ],
)
def test_what_forbids_all_that_a_form_allows_is_named(
    tiny: Callable[[str], Path], others: dict[str, Any], named: str
) -> None:
    """The model's weights are not blamed; the engine goes on."""
    params = {"structured_outputs": {"choice": ["abc"]}, "max_tokens": 5, "temperature": 0}
    with LLM(tiny("llama"), dtype="float32", num_gpu_blocks=64, kvcache_block_size=8) as llm:
        assert llm.tokenizer.encode("abc", add_special_tokens=False) == [68, 69, 70]
        output = llm.generate([PROMPTS[2]], [params | others], use_tqdm=False)[0]
        assert isinstance(output.error, InvalidParamsError) and named in str(output.error)
        assert llm.generate([PROMPTS[2]], [params], use_tqdm=False)[0]["text"] == "abc"


def test_what_others_computed_stays_cached_when_a_request_forbids_all(
    tiny: Callable[[str], Path],
) -> None:
    """A client that asks so again and again costs the others nothing."""
    good = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    bad = good | {"structured_outputs": {"choice": ["abc"]}, "allowed_token_ids": [69]}
    prompt = [7 * i % 256 for i in range(40)]
    with LLM(tiny("llama"), dtype="float32", num_gpu_blocks=64, kvcache_block_size=8) as llm:
        cached = []
        for params in (good, bad, good):
            (output,) = llm.generate([prompt], [params], use_tqdm=False)
            cached.append(output.num_cached_tokens)
            assert (output.error is None) == (params is good)
    assert cached == [0, 39, 39]


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_end_of_a_form_is_not_part_of_it(llm: LLM, is_kept: bool) -> None:
    """Even if special tokens show, and the model's own end would not end the text."""
    params = SamplingParams(
        max_tokens=20,
        n=4,
        seed=2,
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=is_kept,
        structured_outputs={"regex": "abc(d)?"},
    )
    (output,) = llm.generate("x", params, use_tqdm=False)
    for made in output.outputs:
        assert made.finish_reason == "stop"
        assert re.fullmatch(r"abcd?(<\S+>)?" if is_kept else "abcd?", made.text), made.text


def test_rows_that_sample_are_no_more_than_planned(tiny: Callable[[str], Path]) -> None:
    """Forced tokens leave room for requests that come in the same step."""
    engine = small_engine(tiny("llama"), max_num_seqs=64, max_num_batched_tokens=2048)
    sample, counts = engine.runner.sampler.sample, []

    def watched(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        counts.append(len(logits))
        return sample(logits, *rest)

    engine.runner.sampler.sample = watched
    form = StructuredOutputsParams(choice=["abcdefghijklmnopqrstuvwxyz" * 2])
    held = SamplingParams(temperature=0, max_tokens=60, structured_outputs=form)
    for first in range(4):
        engine.add_request([5 + first, 6, 7], held)
    engine.step()
    for first in range(60):
        engine.add_request([9 + first, 6], SamplingParams(temperature=0, max_tokens=2))
    while engine.has_unfinished_requests:
        engine.step()
    assert max(counts) <= engine.config.sampled_rows == 64
    engine.close()
