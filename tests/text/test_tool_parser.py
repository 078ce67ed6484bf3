"""Calls of tools and thoughts in answers, as each family of models writes them, however they are
cut into parts; and what hostile answers cost.
"""

from __future__ import annotations

import ast
import functools
import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoengine.outputs import ChatMessage, CompletionOutput, RequestOutput
from nanoengine.text.answer_parser import AnswerParser, ChatParsers, message_of
from nanoengine.text.answer_pieces import Kind, Piece, merged
from nanoengine.text.reasoning import BY_NAME as REASONING
from nanoengine.text.reasoning import ReasoningParser, ThoughtTokens, reasoning_of
from nanoengine.text.tool_parser import ChannelParser, ToolParser
from nanoengine.text.tool_syntax import BY_NAME, PLAIN
from nanoengine.text.tools import read_tools

PARIS = {"city": "Paris", "days": 3}
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS: Any = {"weather": SCHEMA, "now": {"properties": {"utc": {"type": "boolean"}}}}
OBJECT = '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}'
HERMES = f"<tool_call>\n{OBJECT}\n</tool_call>"
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
QUOTE = '<|"|>'
GEMMA = f"<|tool_call>call:weather{{city:{QUOTE}Paris{QUOTE},days:3}}<tool_call|>"
DEEP = (
    f'{{city:{QUOTE}a "b"\n}}<|{QUOTE},days:-1.5,'
    f"more:{{a:[1,null,None,true,{QUOTE}x{QUOTE}],b:{{}}}},word:two words}}"
)
CHANNELS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
)
LFM2, LFM2_END = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHON = "weather(city='Paris', days=3)"
ODD_PYTHON = (
    r"""city='it\'s\n"a" \u00e9\x41\101', days=-1.5, more={'a': [1, [None, (True,)],], "b": {}}, """
    r"""pair=("x", ), empty='', long='''a'b"c''', near="(),]}: ", far="\\" """
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Paris'
    '</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls>"
)
TO_SELF = " to=self<|message|>hm<|eom|><|start|>assistant"
SEED = (
    "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3"
    "</parameter>\n</function>\n</seed:tool_call>"
)
KIMI_CALL = (
    '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Paris", "days": 3}'
    "<|tool_call_end|>"
)
KIMI = f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL}<|tool_calls_section_end|>"
HUNYUAN = (
    '<tool_calls><tool_call>weather\n```json\n{"city": "Paris", "days": 3}\n```</tool_call>\n'
    "<tool_call>now\n```json\n{}\n```</tool_call></tool_calls>"
)
COHERE_CALL = (
    '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris", "days": 3}}'
)
COHERE = f"<|START_ACTION|>[\n    {COHERE_CALL},\n\n    {COHERE_CALL}\n]<|END_ACTION|>"
APERTUS = '<|tools_prefix|>[{"weather": {"city": "Paris", "days": 3}}, {"now": {}}]<|tools_suffix|>'


def deep(words: str) -> str:
    """A mark of DeepSeek's."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


SEEK_CALL = (
    deep("tool call begin")
    + (f'function{deep("tool sep")}weather\n```json\n{{"city": "Paris", "days": 3}}\n```')
    + deep("tool call end")
)
SEEK = deep("tool calls begin") + f"{SEEK_CALL}\n{SEEK_CALL}" + deep("tool calls end")
SEEK_31 = SEEK.replace("function" + deep("tool sep"), "").replace("\n```json\n", deep("tool sep"))
SEEK_31 = SEEK_31.replace("\n```", "").replace("\n", "")
NOW = ("now", {})
CALL = ("weather", PARIS)
# Syntax, answer, content, calls.
WHOLE: list[tuple[str, str, str | None, list[tuple[str, Any]]]] = [
    ("hermes", HERMES, None, [CALL]),
    ("hermes", f"I look.\n\n{HERMES}\n{HERMES}\n", "I look.", [CALL, CALL]),
    ("hermes", HERMES.replace(", ", ",").replace("\n", ""), None, [CALL]),
    ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call> ok', " ok", [NOW]),
    ("hermes", '<tool_call>{"arguments": {"utc": true}, "name": "now"}</tool_call>', None,
     [("now", {"utc": True})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "}"}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', None, [NOW]),
    # Braces that the model left out.
    ("hermes", HERMES.replace("}}", "}") + HERMES + " ok", " ok", [CALL, CALL]),
    ("hermes", HERMES.replace("}}", "}, ").replace("</tool", '"id": 1}</tool'), None, [CALL]),
    ("granite", f"<|tool_call|>[{OBJECT[:-1]}, {OBJECT}]", None, [CALL, CALL]),
    ("hermes", "no call at all \n", "no call at all \n", []),
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None, []),
    ("hermes", f"<tool_call>[1]</tool_call>\n{HERMES}", "<tool_call>[1]</tool_call>", [CALL]),
    ("hermes", "a <tool_ca", "a <tool_ca", []),
    ("hermes", '<tool_call>{"name": "weather", "arg', None, []),
    ("qwen3_coder", f"So:\n{CODER}", "So:", [CALL]),
    ("qwen3_coder", f"{CODER}\n{CODER}", None, [CALL, CALL]),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>", None, [NOW]),
    ("qwen3_coder", "<tool_call><function=now><parameter=utc>True</parameter></function>",
     None, [("now", {"utc": True})]),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>\n1\n\n</parameter></function>",
     None, [("weather", {"city": "1\n"})]),
    ("qwen3_coder", '<tool_call><function=now><parameter=x>{"a": [1]}</parameter></function>',
     None, [("now", {"x": {"a": [1]}})]),
    ("qwen3_coder", "<tool_call><function=rm></function></tool_call>", None, []),
    ("qwen3_coder", f"So:\n{CODER.removeprefix('<tool_call>')}", "So:", [CALL]),
    ("qwen3_coder", "<function=now>\n</function>\n<function=now></function>", None, [NOW, NOW]),
    # Ends of values that the model left out.
    ("qwen3_coder", CODER.replace("\n</parameter>", ""), None, [CALL]),
    ("qwen3_coder", CODER.replace("\n</parameter>", "") + CODER, None, [CALL, CALL]),
    ("qwen3_coder", "<function=weather><parameter=city>Rome</function>", None,
     [("weather", {"city": "Rome"})]),
    ("qwen3_coder", "<function=now><parameter=x></function>, </parameter></function>", None,
     [("now", {"x": "</function>, "})]),
    ("glm45", GLM.replace("</arg_value>\n</tool", "</tool") + GLM, None, [CALL, CALL]),
    ("qwen3_coder", "I call <function=rm>.", "I call <function=rm>.", []),
    ("qwen3_coder", "<tool_call>now></function>", "<tool_call>now></function>", []),
    ("glm45", f"{GLM}\n{GLM}", None, [CALL, CALL]),
    ("glm45", GLM.replace("\n", ""), None, [CALL]),
    ("glm45", "<tool_call>now</tool_call>", None, [NOW]),
    ("gemma4", f"I look.\n{GEMMA}{GEMMA}", "I look.", [CALL, CALL]),
    ("gemma4", "<|tool_call>call:now{}<tool_call|> ok", " ok", [NOW]),
    ("gemma4", f"<|tool_call>call:weather{DEEP}<tool_call|>", None,
     [("weather", {"city": 'a "b"\n}<|', "days": -1.5, "word": "two words",
                   "more": {"a": [1, None, None, True, "x"], "b": {}}})]),
    ("gemma4", f"<|tool_call> call:weather {{ city: {QUOTE}Paris{QUOTE}, days: 3 }}", None, [CALL]),
    ("gemma4", "<|tool_call>call:rm{}<tool_call|>", "<|tool_call>call:rm{}<tool_call|>", []),
    ("gemma4", "<|tool_call>call weather", "<|tool_call>call weather", []),
    ("mistral", f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]", None, [CALL, CALL]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now{}', None,
     [CALL, NOW]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("granite", f"<|tool_call|>[{OBJECT}, {OBJECT}]", None, [CALL, CALL]),
    ("granite", f"I look. <tool_call> [{OBJECT}]", "I look.", [CALL]),
    ("llama3_json", OBJECT.replace("arguments", "parameters"), None, [CALL]),
    ("llama3_json", f"<|python_tag|>{OBJECT}; {OBJECT}", None, [CALL, CALL]),
    ("llama3_json", f"{OBJECT}\n{OBJECT}\n", None, [CALL, CALL]),
    ("llama3_json", f"{OBJECT}\n{{}}", '\n{}', [CALL]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', None, [NOW]),
    ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3_json", f"As {OBJECT}", f"As {OBJECT}", []),
    ("list", f"[{OBJECT}, {OBJECT}]", None, [CALL, CALL]),
    ("lfm2", f"{LFM2}[{PYTHON}]{LFM2_END}It rains.", "It rains.", [CALL]),
    ("lfm2", f"I look.\n{LFM2}[{PYTHON}, now( ), {PYTHON}]{LFM2_END}", "I look.",
     [CALL, NOW, CALL]),
    ("lfm2", f"{LFM2}{PYTHON}{LFM2_END}{LFM2}[now()]{LFM2_END}", None, [CALL, NOW]),
    ("lfm2", f"{LFM2}[{OBJECT}, {OBJECT}]{LFM2_END} ok", " ok", [CALL, CALL]),
    ("lfm2", f"{LFM2}[weather({ODD_PYTHON})]{LFM2_END}", None,
     [("weather", {"city": 'it\'s\n"a" \u00e9AA', "days": -1.5, "pair": ["x"], "empty": "",
                   "more": {"a": [1, [None, [True]]], "b": {}}, "long": "a'b\"c",
                   "near": "(),]}: ", "far": "\\"})]),
    # As a template without escapes writes it; and words that are no Python.
    ("lfm2", f"{LFM2}[weather(city='it's \"fine\"', days=many)]{LFM2_END}", None,
     [("weather", {"city": "it's \"fine\"", "days": "many"})]),
    ("lfm2", rf"{LFM2}[weather(city='\ud83d\ude00\d', a={{1: 2}})]{LFM2_END}", None,
     [("weather", {"city": "\U0001f600\\d", "a": {"1": 2}})]),
    ("lfm2", f"{LFM2}[weather(Paris)]{LFM2_END}", None, []),
    ("lfm2", f"{LFM2}[rm(x=1)]{LFM2_END}", None, []),
    ("lfm2", f"{LFM2}[weather[city]]{LFM2_END}", None, []),
    ("lfm2", f"{LFM2}[now(), rm()]{LFM2_END}", f", rm()]{LFM2_END}", [NOW]),
    ("lfm2", f"{LFM2}[weath", None, []),
    ("olmo3", f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>", None, [CALL, NOW]),
    ("olmo3", "<function_calls>now(utc=true)</function_calls>\n", None, [("now", {"utc": True})]),
    ("minimax_m2", f"So.\n{MINIMAX}", "So.", [CALL]),
    ("minimax_m2", MINIMAX.replace("</minimax", '<invoke name="now">\n</invoke>\n</minimax'), None,
     [CALL, NOW]),
    ("minimax_m2", MINIMAX.replace("Paris", "\n<b>\n"), None,
     [("weather", {"city": "\n<b>\n", "days": 3})]),
    ("minimax_m2", MINIMAX.replace("weather", "rm"), None, []),
    ("muse_glimmer", f"So.\n{ATEM}", "So.", [CALL]),
    ("muse_glimmer", ATEM.replace("</atem:f", '<atem:invoke name="now">\n</atem:invoke>\n</atem:f'),
     None, [CALL, NOW]),
    # A template may show a tool as a space of names that has one of the same name.
    ("muse_glimmer", ATEM.replace("weather", "weather.weather"), None, [CALL]),
    ("muse_glimmer", ATEM.replace("weather", "rm.weather"), None, []),
    ("muse_glimmer", ATEM.replace("Paris", " <b>\n"), None,
     [("weather", {"city": " <b>\n", "days": 3})]),
    ("seed_oss", f"{SEED}\n{SEED}", None, [CALL, CALL]),
    ("seed_oss", SEED.replace("weather", "rm"), None, []),
    ("kimi_k2", f"I look.{KIMI}", "I look.", [CALL, CALL]),
    ("kimi_k2", KIMI.replace("functions.weather", "weather"), None, []),
    ("hunyuan_a13b", f"I look.{HUNYUAN}", "I look.", [CALL, NOW]),
    ("hunyuan_a13b", HUNYUAN.replace("<tool_calls>", ""), None, [CALL, NOW]),
    ("hunyuan_a13b", HUNYUAN.replace("weather", "rm").replace("now", "ls"), None, []),
    ("hunyuan_a13b", f"<tool_calls>[{OBJECT}, {OBJECT}]</tool_calls>", None, [CALL, CALL]),
    ("nemotron_v2", f"<TOOLCALL>[{OBJECT}]</TOOLCALL>\n", None, [CALL]),
    ("nemotron_v2", "<TOOLCALL>none</TOOLCALL>", "<TOOLCALL>none</TOOLCALL>", []),
    ("phi4_mini_json", f"functools[{OBJECT}, {OBJECT}]", None, [CALL, CALL]),
    ("phi4_mini_json", f"Well. <|tool_call|>{OBJECT}<|/tool_call|>\n", "Well.", [CALL]),
    ("phi4_mini_json", f"<|tool_call|>[{OBJECT}]<|/tool_call|> ok", " ok", [CALL]),
    ("phi4_mini_json", "import functools\nfunctools.reduce", None, []),
    ("cohere_command3", f"I look.{COHERE}", "I look.", [CALL, CALL]),
    ("cohere_command3", COHERE.replace('"tool_call_id": "0", ', ""), None, [CALL, CALL]),
    ("cohere_command3", COHERE.replace("weather", "rm"), None, []),
    ("cohere_command3", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}, {}]',
     ", {}]", [NOW]),
    ("apertus", f"I look.\n{APERTUS}", "I look.", [CALL, NOW]),
    ("apertus", APERTUS.replace("weather", "rm"), None, []),
    ("apertus", '<|tools_prefix|>[{"now": {}}<|tools_suffix|> ok', " ok", [NOW]),
    ("deepseek_v3", f"I look.{SEEK}", "I look.", [CALL, CALL]),
    ("deepseek_v3", SEEK.replace("weather", "rm"), None, []),
    ("deepseek_v31", f"{SEEK_31}\n", None, [CALL, CALL]),
    ("deepseek_v31", SEEK_31.replace("weather", "rm"), None, []),
    *((name, HERMES, None, [CALL]) for name in ("qwen3_json", "granite4")),
    *((name, GLM, None, [CALL]) for name in ("glm47", "poolside_v1")),
    ("qwen3_xml", CODER, None, [CALL]),
    ("llama4_json", OBJECT.replace("arguments", "parameters"), None, [CALL]),
]  # fmt: skip


def parser(name: str) -> AnswerParser:
    return AnswerParser([ToolParser(BY_NAME.get(name, PLAIN), SCHEMAS)], None)


def parted(made: AnswerParser, text: str, cuts: list[int]) -> list[Piece]:
    """The pieces of a text that comes in parts."""
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    parts = [made.read(text[a:b], is_last=False) for a, b in pairwise(edges)]
    return merged([piece for part in parts for piece in part] + made.read("", is_last=True))


def calls_of(message: ChatMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WHOLE)
def test_calls_of_each_family(name: str, text: str, content: str | None, calls: Any) -> None:
    made = parser(name)
    message = message_of(made.read(text, is_last=True))
    assert calls_of(message) == calls
    assert message.content == (text if content is None and not calls else content)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(WHOLE), st.lists(st.integers(0, 400), max_size=12))
def test_how_an_answer_is_cut_changes_nothing(row: Any, cuts: list[int]) -> None:
    name, text, *_ = row
    pieces = parted(parser(name), text, cuts)
    assert pieces == parted(parser(name), text, [])
    assert parted(parser(name), text, list(range(len(text)))) == pieces
    kinds = [(piece.kind, piece.call) for piece in pieces]
    names = [call for kind, call in kinds if kind is Kind.NAME]
    assert names == sorted(set(names))  # once each, in order


@pytest.mark.parametrize(
    ("name", "before"),
    [("gemma4", "<|tool_call>call:weather{days:"), ("lfm2", f"{LFM2}[weather(days=")],
)
def test_a_word_that_is_too_long_ends_in_one_place(name: str, before: str) -> None:
    """One without quotes, wherever the text is cut."""
    text = before + "1" * 5000 + "})"
    pieces = parted(parser(name), text, [])
    for step in (1, 50, 3000):
        assert parted(parser(name), text, list(range(0, len(text), step))) == pieces


OPTIONAL: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
# The schema of an argument, what the model wrote, and the value.
VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "12345", "12345"),
    (OPTIONAL, "12345", "12345"),
    (OPTIONAL, "null", None),
    (OPTIONAL, '"x"', '"x"'),
    (OPTIONAL, "[1]", "[1]"),
    ({"type": ["string", "null"]}, "007", "007"),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": ["string", "integer"]}, "7.5", "7.5"),
    ({"type": ["string", "number"]}, "7", 7),
    ({"type": ["boolean", "null"]}, "True", True),
    ({"type": ["boolean", "null"]}, "None", None),
    ({"type": ["boolean", "array"]}, '["README.md", "True"]', ["README.md", "True"]),
    ({"type": ["boolean", "object"]}, '{"Path": "A"}', {"Path": "A"}),
    ({"type": ["string", "null"]}, "None", "None"),
    ({"type": "array"}, "['a', (1, True), {'b': None}]", ["a", [1, True], {"b": None}]),
    ({"type": "array"}, "[open('x')]", "[open('x')]"),
    ({"type": "array"}, "{1, 2}", "{1, 2}"),
    ({"type": "array"}, "[" * 9000, "[" * 9000),
    ({"type": "object"}, "{'a': 1e999}", "{'a': 1e999}"),
    ({"allOf": [{"type": "string"}, {"minLength": 5}]}, "12345", "12345"),
    ({"allOf": [{"minimum": 5}, {"type": ["integer", "string"]}]}, "12345", 12345),
    ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "5", 5),
    ({"oneOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
    ({"oneOf": [{"type": "string"}, {}]}, "[1]", [1]),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"const": "1"}, "1", "1"),
    ({"$ref": "#/$defs/zip"}, "12345", "12345"),
    ({"allOf": [{"$ref": "#/$defs/zip"}]}, "12345", "12345"),
    ({"$ref": "#/$defs/a~1b"}, "5", "5"),
    ({"$ref": "#/$defs/circle"}, "5", 5),
    ({"$ref": "#/$defs/wide"}, "5", 5),
    (functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(5000), {}), "5", 5),
    ({"$ref": "#/$defs/none"}, "5", 5),
    ({"$ref": "https://example.org/zip"}, "5", 5),
    ({"type": 5, "enum": "x", "anyOf": {}}, "5", 5),
    ({"type": "integer"}, "1e5", 1e5),
    ({"type": "integer"}, "many", "many"),
    ({}, '"x"', "x"),
    (True, "null", None),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_an_argument_has_a_type_of_its_schema(
    name: str, schema: Any, text: str, value: Any
) -> None:
    defs = {"zip": {"type": "string"}, "a/b": OPTIONAL, "circle": {"$ref": "#/$defs/circle"}}
    defs["wide"] = {"anyOf": [{"$ref": "#/$defs/wide"}] * 50}
    schemas = {"f": {"properties": {"x": schema}, "$defs": defs}}
    written = {
        "qwen3_coder": f"<tool_call><function=f><parameter=x>{text}</parameter></function>",
        "glm45": f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>",
    }
    made = AnswerParser([ToolParser(BY_NAME[name], schemas)], None)
    (call,) = message_of(made.read(written[name], is_last=True)).tool_calls
    found = json.loads(call.arguments)
    assert found == {"x": value} and type(found["x"]) is type(value)


TEXT = {"type": "string"}
NAMED_ELSEWHERE: list[dict[str, Any]] = [
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": TEXT}}}},
    {"allOf": [{"properties": {"y": {}}}, {"properties": {"x": TEXT}}]},
    {"anyOf": [{"properties": {"x": {"type": "null"}}}, {"properties": {"x": TEXT}}]},
    {"additionalProperties": TEXT, "properties": {"y": {}}},
    {"oneOf": [{"$ref": "#"}, {"properties": {"x": TEXT}}]},
]


@pytest.mark.parametrize("root", NAMED_ELSEWHERE)
def test_an_argument_may_be_named_elsewhere(root: Any) -> None:
    """Than among the properties of the schema itself."""
    made = AnswerParser([ToolParser(BY_NAME["qwen3_coder"], {"f": root})], None)
    text = "<tool_call><function=f><parameter=x>12345</parameter></function></tool_call>"
    (call,) = message_of(made.read(text, is_last=True)).tool_calls
    assert json.loads(call.arguments) == {"x": "12345"}


def test_arguments_come_before_the_call_has_ended() -> None:
    made = parser("hermes")
    assert made.read("Hm.\n<tool_call>\n{", is_last=False) == [Piece(Kind.CONTENT, "Hm.")]
    assert made.read('"name": "weather", "arguments": ', is_last=False) == []
    assert made.read('{"city"', is_last=False) == [
        Piece(Kind.NAME, "weather"),
        Piece(Kind.ARGUMENTS, '{"city"'),
    ]
    assert made.read(': "}\\"', is_last=False) == [Piece(Kind.ARGUMENTS, ': "}\\"')]
    assert made.read('"}}\n</tool_call>', is_last=False) == [Piece(Kind.ARGUMENTS, '"}')]


def test_a_bare_text_comes_as_json_before_it_has_ended() -> None:
    made = parser("gemma4")
    assert made.read("<|tool_call>call:weather{ci", is_last=False) == [
        Piece(Kind.NAME, "weather"),
        Piece(Kind.ARGUMENTS, "{"),
    ]
    assert made.read(f'ty:{QUOTE}a"<', is_last=False) == [Piece(Kind.ARGUMENTS, '"city": "a\\"')]
    assert made.read('|"', is_last=False) == []
    assert made.read("b", is_last=False) == [Piece(Kind.ARGUMENTS, '<|\\"b')]
    assert made.read(f"{QUOTE}, days:1", is_last=False) == [Piece(Kind.ARGUMENTS, '", "days": ')]
    assert made.read("2}", is_last=False) == [Piece(Kind.ARGUMENTS, "12}")]


def test_arguments_of_python_come_before_the_call_has_ended() -> None:
    made = parser("lfm2")
    assert made.read(f"{LFM2}[weather(ci", is_last=False) == []
    assert made.read("ty='a", is_last=False) == [
        Piece(Kind.NAME, "weather"),
        Piece(Kind.ARGUMENTS, '{"city": "a'),
    ]
    assert made.read("' b", is_last=False) == [Piece(Kind.ARGUMENTS, "' b")]
    assert made.read("' ", is_last=False) == []
    assert made.read(", days=1", is_last=False) == [Piece(Kind.ARGUMENTS, '", "days": ')]
    assert made.read("2)", is_last=False) == [Piece(Kind.ARGUMENTS, "12}")]


def test_arguments_of_python_are_what_python_reads() -> None:
    tree = ast.parse(f"f({ODD_PYTHON})", mode="eval").body
    assert isinstance(tree, ast.Call)
    wanted = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
    message = message_of(parted(parser("lfm2"), f"{LFM2}[weather({ODD_PYTHON})]", []))
    ((_, found),) = calls_of(message)
    assert found == json.loads(json.dumps(wanted))


def test_one_call_alone() -> None:
    made = AnswerParser([ToolParser(BY_NAME["hermes"], SCHEMAS)], 1)
    assert calls_of(message_of(made.read(HERMES * 3, is_last=True))) == [CALL]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12))
def test_channels(cuts: list[int]) -> None:
    def read(text: str) -> ChatMessage:
        return message_of(parted(AnswerParser([ChannelParser(SCHEMAS)], None), text, cuts))

    message = read(CHANNELS)
    assert (message.content, message.reasoning, calls_of(message)) == (None, "hm", [CALL])
    said = read(
        CHANNELS.partition("<|start|>")[0] + "<|start|>assistant<|channel|>final<|message|>a<b"
    )
    assert (said.content, said.reasoning, said.tool_calls) == ("a<b", "hm", ())
    head = "<|channel|>commentary to=functions.now<|message|>"
    for text, calls in (
        (head, [NOW]),
        (f"{head}<|call|>", [NOW]),
        (f"{head}<|call|><|start|>assistant{head}{{}}<|call|>", [NOW, NOW]),
    ):
        assert calls_of(read(text)) == calls


@pytest.mark.parametrize(
    ("text", "thoughts", "content", "calls"),
    [
        (f"{TO_SELF} to=user<|message|>Hi.<|eot|>", "hm", "Hi.", []),
        (f"{TO_SELF}<|message|>Hi.", "hm", "Hi.", []),
        ("to=user<|message|>Hi.", "", "Hi.", []),
        ("Hi to=you and <b>.", "", "Hi to=you and <b>.", []),
        (f"{TO_SELF} to=weather<|message|>{ATEM}<|eot|>", "hm", None, [CALL]),
        # Several calls, each a message.
        (f"{TO_SELF} to=weather<|message|>{ATEM}<|eom|><|start|>assistant to=weather<|message|>"
         f"{ATEM}<|eot|>", "hm", None, [CALL, CALL]),
        # The ends that a model leaves out: of a message, and of its header, too.
        (" to=self<|message|>hm<|start|>assistant to=user<|message|>Hi.", "hm", "Hi.", []),
        (" to=self<|message|>hm\nto=user<|message|>Hi.", "hm", "Hi.", []),
        (" to=self<|message|>hm goto=user", "hm goto=user", "", []),
        (f"{TO_SELF} to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi.", "hmhm",
         "Hi.", []),
        (" to=user<|message|>run goto=self<|message|>now", "", "run goto=selfnow", []),
        # Cut off within a header, or within thoughts.
        (f"{TO_SELF} to=us", "hm", "", []),
        (" to=sel", "", "", []),
        (" to=self<|message|>hm to=", "hm to=", "", []),
        # A text in a form, which has no header; and what is no header.
        (TO_SELF.removesuffix("<|start|>assistant") + '{"a": 1}', "hm", '{"a": 1}', []),
        (f"{TO_SELF}, I say<|start|><|start|>", "hm", "assistant, I say", []),
    ],
)  # fmt: skip
def test_messages_to_recipients(
    text: str, thoughts: str, content: str | None, calls: list[Any]
) -> None:
    parsers = ChatParsers(BY_NAME["muse_glimmer"], REASONING["muse_glimmer"], shows_tools=True)
    functions = [{"type": "function", "function": {"name": n, **s}} for n, s in SCHEMAS.items()]
    use = read_tools(functions, "auto")
    whole = parted(parsers.parser("<|start|>assistant", use), text, [])
    message = message_of(whole)
    assert (message.reasoning, message.content, calls_of(message)) == (thoughts, content, calls)
    letters = list(range(len(text)))
    assert parted(parsers.parser("<|start|>assistant", use), text, letters) == whole


@pytest.mark.parametrize("num", [3, 256, 300])
def test_thoughts_may_end_in_many_line_breaks(num: int) -> None:
    """Only so many are held back, and dropped: a model that writes nothing else takes no longer."""
    text = f"hm{chr(10) * num}</think>yes"
    found = []
    for cuts in ([], list(range(len(text)))):
        made = AnswerParser([ReasoningParser(REASONING["qwen3"], True)], None)
        message = message_of(parted(made, text, cuts))
        found.append((message.reasoning, message.content))
    assert found[0] == found[1] == ("hm" + "\n" * max(0, num - 256), "yes")


@pytest.mark.parametrize("name", ["glm47", "minimax_m2", "poolside_v1", "qwen3"])
def test_thoughts_by_vllms_names(name: str) -> None:
    made = AnswerParser([ReasoningParser(REASONING[name], True)], None)
    message = message_of(made.read("hm\n</think>\n\nSo:", is_last=True))
    assert (message.reasoning, message.content) == ("hm", "So:")


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=12))
def test_contents_know_their_place_in_the_answer(cuts: list[int]) -> None:
    """Also after thoughts, and with marks and calls between them, which keep them apart."""
    parts = ("commentary<|message|>Hm", "final<|message|>So:", "analysis<|message|>hm")
    channels = "<|end|><|start|>assistant".join(f"<|channel|>{part}" for part in parts)
    thoughts = ReasoningParser(REASONING["qwen3"], True)
    hermes = ToolParser(BY_NAME["hermes"], SCHEMAS)
    for parser, text in (
        (AnswerParser([ChannelParser(SCHEMAS)], None), channels),
        (AnswerParser([thoughts, hermes], 1), f"hm\n</think>\n\nHm\n{HERMES}\n{HERMES}So:"),
    ):
        found = [p for p in parted(parser, text, cuts) if p.kind is Kind.CONTENT and p.text.strip()]
        assert [piece.text.strip() for piece in found] == ["Hm", "So:"]
        for piece in found:
            assert text[piece.end - len(piece.text) : piece.end] == piece.text


@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "content"),
    [
        ("a<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
        ("a", "<think>\nhm\n\nhm\n</think>yes\n", "hm\n\nhm", "yes\n"),
        ("a", "yes </think> <think>", "", "yes </think> <think>"),
        ("a<think>\n\n</think>\n\n", "yes", "", "yes"),
        ("a<think>", "hm </thi", "hm </thi", ""),
        ("<think> a", "yes", "", "yes"),
    ],
)
def test_thoughts(prompt: str, text: str, thoughts: str, content: str) -> None:
    row = REASONING["qwen3"]

    def made() -> AnswerParser:
        return AnswerParser([ReasoningParser(row, row.is_open_after(prompt))], None)

    whole = parted(made(), text, [])
    message = message_of(whole)
    assert (message.reasoning, message.content) == (thoughts, content)
    assert parted(made(), text, list(range(len(text)))) == whole


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize(
    ("answer", "thoughts", "content", "calls"),
    [
        (f"a plan\n<|END_THINKING|>{COHERE}", "a plan", None, [CALL, CALL]),
        ("a<|END_THINKING|><|START_RESPONSE|>b\n<|END_RESPONSE|>", "a", "b\n", []),
        ("a<|END_THINKING|>\nb<|END_RESP", "a", "b<|END_RESP", []),
    ],
)
def test_content_may_stand_between_marks(
    answer: str, thoughts: str, content: str | None, calls: Any, begins: bool
) -> None:
    """As Command R7B has it, with thoughts before it or without."""
    answer = f"<|START_THINKING|>{answer}" if begins else answer.partition("<|END_THINKING|>")[2]
    row = REASONING["cohere_command3"]

    def made() -> AnswerParser:
        tools = ToolParser(BY_NAME["cohere_command3"], SCHEMAS)
        return AnswerParser([ReasoningParser(row, False), tools], None)

    whole = parted(made(), answer, [])
    message = message_of(whole)
    assert message.reasoning == (thoughts if begins else "")
    assert (message.content or "").lstrip("\n") == (content or "") and calls_of(message) == calls
    assert parted(made(), answer, list(range(len(answer)))) == whole


AROUND = [
    ("hunyuan_a13b", "<think>\nhm\n</think>\n<answer>\nyes\n</answer>", "hm", "yes", []),
    ("hunyuan_a13b", f"<answer>\nyes\n{HUNYUAN}\n</answer>", "", "yes", [CALL, NOW]),
    ("hunyuan_a13b", f"<think>hm</think>{HUNYUAN}", "hm", None, [CALL, NOW]),
    ("ernie45", "hm\n</think>\n\n<response>\nyes\n</response>\n", "hm", "yes", []),
    ("ernie45", "hm\n</think>\nyes", "hm", "yes", []),
]


@pytest.mark.parametrize(("name", "text", "thoughts", "content", "calls"), AROUND)
def test_answers_stand_between_tags(
    name: str, text: str, thoughts: str, content: str | None, calls: Any
) -> None:
    """As Hunyuan and ERNIE 4.5 have them; the template shows which."""
    sign = {"hunyuan_a13b": "<answer>", "ernie45": "<response>"}[name]
    reasoning = reasoning_of(f"<think> {sign}")
    assert reasoning is not None and reasoning.name == name == REASONING[name].name
    is_open = text.startswith("hm")
    parsers = ChatParsers(BY_NAME["hunyuan_a13b"], reasoning, shows_tools=True)
    functions = [{"type": "function", "function": {"name": n, **s}} for n, s in SCHEMAS.items()]
    for cuts in ([], list(range(len(text)))):
        made = parsers.parser("a<think>\n" * is_open, read_tools(functions, "auto"))
        message = message_of(parted(made, text, cuts))
        assert (message.reasoning, message.content) == (thoughts, content)
        assert calls_of(message) == calls


def test_a_prompt_may_end_with_what_content_begins_with() -> None:
    """As that of Command R7B without tools. The mark behind it is no part of the content."""
    reasoning, prompt = REASONING["cohere_command3"], "<|CHATBOT_TOKEN|><|START_RESPONSE|>"
    parsers = ChatParsers(None, reasoning)
    text = "Hello!\n<|END_RESPONSE|>"
    for cuts in ([], list(range(len(text)))):
        message = message_of(parted(parsers.parser(prompt, None), text, cuts))
        assert message.content == "Hello!\n"


def test_content_of_command_a_plus_stands_between_other_marks() -> None:
    """And a call may follow it."""
    text = f"a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>{COHERE}"
    reasoning = reasoning_of("<|START_THINKING|> <|START_TEXT|>")
    assert reasoning is not None and reasoning.name == "cohere_command4"
    parsers = ChatParsers(BY_NAME["cohere_command4"], reasoning, shows_tools=True)
    functions = [{"type": "function", "function": {"name": n, **s}} for n, s in SCHEMAS.items()]
    made = parsers.parser("a<|START_THINKING|>", read_tools(functions, "auto"))
    message = message_of(parted(made, text, list(range(len(text)))))
    assert (message.reasoning, message.content) == ("a", "b")
    assert calls_of(message) == [CALL, CALL]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "token_ids", "expected"),
    [
        ("muse_glimmer", "a", TO_SELF, [1, 2, 5, 3, 9, 1, 2, 5, 5, 3, 1, 4, 7], 3),
        ("qwen3", "a<think>\n", "hm hm</think>yes", [5, 6, 3, 7], 2),
        ("qwen3", "a", "\n<think>hm</think>yes", [8, 1, 2, 5, 3, 7], 1),
        ("qwen3", "a", "<think></think>yes", [1, 2, 3, 7], 0),
        ("qwen3", "a<think>", "hm hm hm", [5, 6, 7], 3),
        ("qwen3", "a", "yes <think>hm", [7, 1, 2, 5], 0),
        ("qwen3", "a<think>", "hm</think>a<think>b</think>", [5, 3, 7, 1, 2, 6, 3], 1),
        (
            "openai_gptoss",
            "a",
            "<|channel|>analysis<|message|>hm<|end|>",
            [1, 2, 5, 3, 9, 1, 2, 5, 5, 3, 1, 4, 7],
            3,
        ),
    ],
)
def test_tokens_of_thoughts(
    name: str, prompt: str, text: str, token_ids: list[int], expected: int
) -> None:
    """Thoughts begin by 1 and 2, and end by 3."""
    counter = ThoughtTokens(REASONING[name], (1, 2), (3,), lambda ids: "")
    assert counter.count(prompt, text, token_ids) == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["hm", " hm\n", HERMES[:9], HERMES[9:], "</s>"], 2),
        (["hm", " hm", "</think>", HERMES], 2),
        (["hm ", "<tool_call>", " hm", " <tool"], 4),  # no call
        ([HERMES], 0),
    ],
)
@pytest.mark.parametrize("begins", [False, True])
def test_a_call_is_none_of_the_thoughts_that_never_end(
    parts: list[str], expected: int, begins: bool
) -> None:
    """begins: the answer begins its thoughts, not the prompt. A token is a part of the text."""
    prompt, tokens = ("<think>", parts) if not begins else ("a", ["<think>", *parts])
    syntax, words = REASONING["qwen3"], ["", "<think>", "</think>", *parts]
    counter = ThoughtTokens(
        syntax, (1,), (2,), lambda ids: "".join(words[token_id] for token_id in ids)
    )
    parsers = ChatParsers(BY_NAME["hermes"], syntax, True, thoughts=counter)
    ids = [words.index(token) for token in tokens]
    made = CompletionOutput(0, "".join(tokens).removesuffix("</s>"), ids, "stop")
    use = read_tools([{"type": "function", "function": {"name": name}} for name in SCHEMAS])
    assert parsers.num_thoughts(RequestOutput(0, prompt, [5], [made]), use) == expected


def test_calls_after_thoughts() -> None:
    thoughts = ReasoningParser(REASONING["qwen3"], True)
    made = AnswerParser([thoughts, ToolParser(BY_NAME["hermes"], SCHEMAS)], None)
    message = message_of(parted(made, f"{HERMES}?\n</think>\n\n{HERMES}", [3, 30, 90]))
    assert message.reasoning == f"{HERMES}?" and message.content is None
    assert calls_of(message) == [CALL]


@pytest.mark.parametrize("cuts", [[], [2, 25, 60], list(range(300))])
@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "calls"),
    [
        (f"hm\n{HERMES}", "hm", None, [CALL]),
        (f"a <tool_call>?\n\n{HERMES}\n{HERMES}", "a <tool_call>?", None, [CALL, CALL]),
        (f"{HERMES}\nSo", "", "\nSo", [CALL]),
        ("hm <tool_call> hm <tool", "hm <tool_call> hm <tool", "", []),
        ("hm <tool_call>\n" * 40, ("hm <tool_call>\n" * 40).rstrip(), "", []),
    ],
)
def test_a_call_ends_thoughts_that_never_end(
    answer: str, reasoning: str, content: str | None, calls: list[Any], cuts: list[int]
) -> None:
    """As vLLM has it, but for a mark without a call, and a call in thoughts that do end."""
    parsers = ChatParsers(BY_NAME["hermes"], REASONING["qwen3"], shows_tools=True)
    functions = [{"type": "function", "function": {"name": n, **s}} for n, s in SCHEMAS.items()]
    made = parsers.parser("a<think>\n", read_tools(functions, "auto"))
    message = message_of(parted(made, answer, cuts))
    assert (message.reasoning, message.content) == (reasoning, content)
    assert calls_of(message) == calls


BARE = "<|tool_call>call:now"
PYTHON_CALL = f"{LFM2}[now("


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "text",
    [
        BARE + "{a:" * 60_000,
        BARE + "{" + "a" * 200_000,
        BARE + "{a:" + '<|"' * 60_000,
        BARE + "{" + " ," * 100_000,
        PYTHON_CALL + "a='" * 60_000,
        PYTHON_CALL + "a='" + "\\" * 200_000,
        PYTHON_CALL + "a=" + "[" * 100_000,
        PYTHON_CALL + "a='" + " ' " * 60_000,
        PYTHON_CALL + "a='" + "'" + " " * 200_000,
        PYTHON_CALL + ", " * 100_000,
        PYTHON_CALL + "a" * 200_000,
        f"{LFM2}[" * 20_000,
        "<tool_call>" * 20_000,
        '<tool_call>{"name":' * 10_000,
        '<tool_call>{"x":' + "[" * 100_000,
        '<tool_call>{"name": "now", "arguments": ' + '{"a":' * 50_000,
        '<tool_call>{"arguments": ' + '{"a":' * 20_000 + "1" + "}" * 20_000 + ', "name": "now"}',
        " " * 200_000,
        "<tool_call>" + " " * 200_000,
        '<tool_call>{"name": "' + "a" * 200_000,
    ],
)
def test_hostile_answers_take_little_time(text: str) -> None:
    """In parts of 50 characters; a text of the model's own making has one for each token."""
    start = time.process_time()
    marks = {BARE: "gemma4", LFM2: "lfm2"}
    name = next((made for mark, made in marks.items() if text.startswith(mark)), "hermes")
    parted(parser(name), text, list(range(0, len(text), 50)))
    assert time.process_time() - start < 5
