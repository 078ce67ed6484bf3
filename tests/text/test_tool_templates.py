"""Calls on their way back: a chat template of each family writes them into the next prompt, and the
parser that is chosen by this template reads the same calls from those tokens.

The templates are short ones of our own with the marks of Hermes and Qwen 3, Qwen3-Coder, Llama 3.1,
Mistral, GLM 4.5, Gemma 4, Granite 3, gpt-oss, LFM2.5, MiniMax-M2, Seed-OSS, Kimi K2, Hunyuan,
Nemotron Nano v2, Phi-4-mini, Command R7B, Apertus, Muse Glimmer and DeepSeek-V3 and V3.1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_models import TOOLS, tool_model

from nanoengine.outputs import ChatMessage, ToolCall
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tool_syntax import syntax_of
from nanoengine.text.tools import read_tools

SHOWN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
CHATML = (
    SHOWN
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + CALLS
    + "BODY{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
HERMES = (
    '\n<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
)
CODER = (
    "\n<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter="
    "{{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n"
    "</tool_call>"
)
GLM = (
    "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
LLAMA = (
    SHOWN + "{% for m in messages %}<|{{ 'ipython' if m.role == 'tool' else m.role }}|>"
    "{{ m.content or '' }}" + CALLS + '{"name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}{% endfor %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MISTRAL = (
    SHOWN + "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% endif %}{% endfor %}'
)
MISTRAL_NAMED = (
    SHOWN + "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content or '' }}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
    "[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>{% endif %}{% endfor %}"
)
GRANITE = (
    SHOWN + "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{% if m.tool_calls "
    "%}<|tool_call|>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ m.content }}{% endif %}"
    "<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
GEMMA = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}'
    "{{ '{' }}{% for k, w in v | items %}{{ ',' if not loop.first }}{{ k }}:{{ value(w) }}"
    "{% endfor %}}"
    "{% elif v is iterable %}[{% for w in v %}{{ ',' if not loop.first }}{{ value(w) }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    + SHOWN
    + "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content or '' }}" + CALLS + "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}"
    "<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
# The tool is named before the channel.
HARMONY = (
    SHOWN + "{% for m in messages %}<|start|>{{ m.role }}" + CALLS + " to=functions.{{ f.name }}"
    "<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}"
    "{% if not m.tool_calls %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# A text has no escapes here, as in the template of LFM2.5-8B-A1B.
LFM2 = (
    "{% macro value(v) %}{% if v is string %}'{{ v }}'{% else %}"
    "{{ (v | tojson) if v is mapping else v }}{% endif %}{% endmacro %}"
) + CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}<|tool_call_start|>[{% for c in m.tool_calls %}"
    "{{ ', ' if not loop.first }}{{ c.function.name }}("
    "{% for k, v in c.function.arguments | items %}{{ ', ' if not loop.first }}"
    "{{ k }}={{ value(v) }}{% endfor %}){% endfor %}]<|tool_call_end|>{% endif %}",
)
MINIMAX = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}",
)
MUSE = (
    SHOWN
    + "{% for m in messages %}<|start|>{{ m.role }}{% if not m.tool_calls %} to=user<|message|>"
    "{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}{{ '<|eom|><|start|>assistant' if "
    "not loop.first }} to={{ c.function.name }}<|message|><atem:function_calls>\n"
    '<atem:invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}'
    '<atem:parameter name="{{ k }}">{{ v if v is string else v | tojson }}</atem:parameter>\n'
    "{% endfor %}</atem:invoke>\n</atem:function_calls>{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# to=self<|message|> #}"
)
SEED = (
    "\n<seed:tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}"
    "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}"
    "</function>\n</seed:tool_call>"
)
KIMI = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}",
)
HUNYUAN = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}<tool_calls>{% for c in m.tool_calls %}{{ '\n' if not loop.first }}"
    "<tool_call>{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson }}\n```"
    "</tool_call>{% endfor %}</tool_calls>{% endif %}{# <tool_call>function_name #}",
)
LISTED = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}BEGIN[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]END{% endif %}",
)
PHI_TAGS = (
    '<|tool_call|>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}<|/tool_call|>'
)
# Calls are numbered, on lines of their own.
COHERE = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}<|START_ACTION|>[\n{% for c in m.tool_calls %}    "
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{{ ',' if not loop.last }}\n\n{% endfor %}]"
    "<|END_ACTION|>{% endif %}",
)
APERTUS = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}<|tools_prefix|>[{% for c in m.tool_calls %}"
    "{{ '{' }}\"{{ c.function.name }}\": {{ c.function.arguments | tojson }}}"
    "{{ ', ' if not loop.last }}{% endfor %}]<|tools_suffix|>{% endif %}",
)
DEEPSEEK = CHATML.replace(
    CALLS + "BODY{% endfor %}",
    "{% if m.tool_calls %}<|tool calls begin|>{% for c in m.tool_calls %}"
    "{{ '\n' if not loop.first }}<|tool call begin|>function<|tool sep|>{{ c.function.name }}\n"
    "```json\n{{ c.function.arguments | tojson }}\n```<|tool call end|>{% endfor %}"
    "<|tool calls end|>{% endif %}",
)
DEEPSEEK_31 = (
    DEEPSEEK.replace("function<|tool sep|>", "")
    .replace("\n```json\n", "<|tool sep|>")
    .replace("\n```", "")
    .replace("{{ '\n' if not loop.first }}", "")
)


def with_deep_marks(template: str) -> str:
    """With the bars and the spaces of DeepSeek's tokens."""
    for words in ("calls begin", "calls end", "call begin", "call end", "sep"):
        mark = f"<\uff5ctool {words}\uff5c>".replace(" ", "\u2581")
        template = template.replace(f"<|tool {words}|>", mark)
    return template


# The parser, a template, what ends a turn, and whether a turn may have text and several calls.
TEMPLATES = {
    "hermes": (CHATML.replace("BODY", HERMES), "<|im_end|>", True),
    "qwen3_coder": (CHATML.replace("BODY", CODER), "<|im_end|>", True),
    "glm45": (CHATML.replace("BODY", GLM), "<|im_end|>", True),
    "llama3_json": (LLAMA, "<|eot_id|>", False),
    "mistral": (MISTRAL, "</s>", False),
    "mistral, named": (MISTRAL_NAMED, "</s>", True),
    "granite": (GRANITE, "<|end_of_text|>", False),
    "muse_glimmer": (MUSE, "<|eot|>", False),
    "gemma4": (GEMMA, "<turn|>\n", True),
    "openai": (HARMONY, "<|call|>", False),
    "lfm2": (LFM2, "<|im_end|>", True),
    "minimax_m2": (MINIMAX, "<|im_end|>", True),
    "seed_oss": (CHATML.replace("BODY", SEED), "<|im_end|>", True),
    "kimi_k2": (KIMI, "<|im_end|>", True),
    "hunyuan_a13b": (
        LISTED.replace("BEGIN", "<tool_calls>").replace("END", "</tool_calls>"),
        "<|im_end|>",
        True,
    ),
    "nemotron_v2": (
        LISTED.replace("BEGIN", "<TOOLCALL>").replace("END", "</TOOLCALL>"),
        "<|im_end|>",
        True,
    ),
}
TEMPLATES |= {
    name: (template, "<|im_end|>", True)
    for name, template in {
        "hunyuan_a13b, its own": HUNYUAN,
        "phi4_mini_json": LISTED.replace("BEGIN", "functools").replace("END", ""),
        "phi4_mini_json, tags": CHATML.replace("BODY", PHI_TAGS),
        "cohere_command3": COHERE,
        "apertus": APERTUS,
        "deepseek_v3": with_deep_marks(DEEPSEEK),
        "deepseek_v31": with_deep_marks(DEEPSEEK_31),
    }.items()
}
TALK: list[dict[str, Any]] = [{"role": "user", "content": "Will it rain?"}]
ODD = {"city": 'São "Paulo"\n{}', "days": 3, "more": {"a": [1, None, "x"]}}


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        # As the templates of LFM2 and LFM2.5 have them that show tools and write no calls.
        ('"List of tools: <|tool_list_start|>["', "lfm2"),
        ('"List of tools: ["', "lfm2"),
        ("'<minimax:tool_call>'", "minimax_m2"),
        ("<seed:tool_call>\\n<function=example_function_name>", "seed_oss"),
        ("<tool_call>\\n<function=example_function_name>", "qwen3_coder"),
        ("<TOOLCALL>[", "nemotron_v2"),
        # As vLLM's templates and llama.cpp's show it.
        ('formatted as functools[{"name": [function name], ', "phi4_mini_json"),
        ('<|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>', "phi4_mini_json"),
        ("Action: write <|START_ACTION|> followed by", "cohere_command3"),
        ("set tool_calls_token = '<|tools_prefix|>'", "apertus"),
        (with_deep_marks("function<|tool sep|>NAME\\n```json\\n{"), "deepseek_v3"),
        (with_deep_marks("tool_call_name<|tool sep|>tool_call_arguments"), "deepseek_v31"),
    ],
)
def test_a_template_shows_how_its_model_writes_calls(sign: str, name: str) -> None:
    syntax = syntax_of(f"{{% for t in tools %}}{sign}{{{{ t }}}}{{% endfor %}}")
    assert syntax is not None and syntax.name == name


def test_a_template_for_tools_alone_may_show_thoughts(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tool_model(tiny("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    named = {"default": "plain", "tool_use": "{{ tools }}<|START_THINKING|>"}
    listed = [{"name": name, "template": template} for name, template in named.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": listed}))
    reasoning = ChatParsers.of(Tokenizer.from_folder(folder)).reasoning
    assert reasoning is not None and reasoning.name == "cohere_command3"


def test_kimis_ids_name_the_tool(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Counted over the conversation, whatever ids came; so do the answers of tools."""
    answered = "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}"
    template = KIMI.replace("{{ m.content", f"{answered}{{{{ m.content")
    assert answered in template
    tokenizer = Tokenizer.from_folder(tool_model(tiny("llama"), tmp_path / "model", template))
    talk: list[dict[str, Any]] = [*TALK]
    for ids in (("call_a", "call_b"), ("call_a",)):
        calls = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": "{}"}}
            for i, n in zip(ids, ("weather", "now"), strict=False)
        ]
        talk.append({"role": "assistant", "content": "", "tool_calls": calls})
        talk += [{"role": "tool", "tool_call_id": i, "content": "sun"} for i in reversed(ids)]
    talk.append({"role": "tool", "tool_call_id": "unknown", "content": "sun"})
    text = tokenizer.apply_chat_template(talk, tools=TOOLS)
    assert re.findall(r"begin\|>(functions\S*?)<", text) == [
        *("functions.weather:0", "functions.now:1", "functions.weather:2")
    ]
    assert re.findall("Return of (.*)", text) == [
        *("functions.now:1", "functions.weather:0", "functions.weather:2", "unknown")
    ]


@pytest.mark.some(7)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_comes_back_as_it_was(
    tiny: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    template, end, is_rich = TEMPLATES[name]
    folder = tool_model(tiny("llama"), tmp_path / "model", template)
    tokenizer = Tokenizer.from_folder(folder)
    parsers = ChatParsers.of(tokenizer)
    assert parsers.tools is not None and parsers.tools.name == name.partition(",")[0]
    calls = [ToolCall("123456789", "weather", json.dumps(ODD, ensure_ascii=False))]
    if is_rich or name in ("granite", "mistral", "muse_glimmer"):
        calls.append(ToolCall("abcdefghi", "now", "{}"))
    message = ChatMessage("I look." if is_rich else None, "", tuple(calls))
    prompt = tokenizer.apply_chat_template(TALK, tools=TOOLS)
    whole = tokenizer.apply_chat_template([*TALK, message.as_dict()], False, tools=TOOLS)
    assert whole.startswith(prompt)
    written = tokenizer.encode(whole[len(prompt) :].removesuffix(end), add_special_tokens=False)
    text = tokenizer.decode(written, skip_special_tokens=False)
    read = parsers.message(text, prompt, read_tools(TOOLS))
    assert read.content == message.content
    assert [(call.name, json.loads(call.arguments)) for call in read.tool_calls] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]
