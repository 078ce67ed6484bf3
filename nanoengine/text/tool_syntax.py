"""How families of models write calls of tools: a row for each, by vLLM's names of parsers.

Sources: the chat templates and model cards of Hermes 2 Pro, Qwen 2.5 to 3.5, Qwen3-Coder, Llama 3.1
to 3.3, Mistral, GLM 4.5, Gemma 4, Granite 3, gpt-oss, LFM2 and 2.5, OLMo 3, MiniMax-M2, Seed-OSS,
Hunyuan, Nemotron Nano v2, Kimi K2, Command R7B, Apertus, with vLLM's or llama.cpp's templates
Phi-4-mini, DeepSeek-V3, V3.1 and R1, and by SGLang's parser Muse Glimmer. tool_parser.py reads
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MAX_NAME = 128  # characters of a tool's name, as Anthropic has it
NAME = rf"([a-zA-Z0-9_.-]{{1,{MAX_NAME}}})"
LAZY_NAME = rf"([a-zA-Z0-9_.-]{{1,{MAX_NAME}}}?)"
SPACES = r"\s{0,16}"


def head_of(name: str) -> str:
    """What a call as an object has before its arguments, and `name`, as a regular expression."""
    keys = rf'"(?:arguments|parameters)"{SPACES}:'
    return rf'\{{{SPACES}"name"{SPACES}:{SPACES}"{name}"{SPACES},{SPACES}{keys}'


@dataclass(frozen=True, slots=True)
class Objects:
    """Calls as {"name": ..., "arguments": {...}}; "parameters" does as well. before: the first one;
    between: two of them, where models may write spaces alone; "" if only one follows each mark;
    after: what may follow the last one.
    """

    before: str = ""
    between: str = ""
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """A call as its name and its arguments, an object. head: from the mark to that object, a
    regular expression whose group is the name. after: what may follow it. quote: what stands before
    and after a text of an object whose keys have no quotes (bare_object.py); "": it is JSON.
    between: two calls; "" if only one follows each mark. end: what may follow the last one.
    """

    head: str
    after: tuple[str, ...] = ()
    quote: str = ""
    between: str = ""
    end: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tagged:
    """A call as its name and its arguments one by one, between tags.

    head: as in Named, up to the first argument. key, value: what a key and a value begin with;
    key_end, value_end: what follows them. after: what follows the last value. next_part: what a
    value whose end a model left out ends before, a regular expression of at most MAX_END
    characters (answer_pieces.py). trims: the line breaks around a value are not part of it.
    """

    head: str
    key: str
    key_end: str
    value: str
    value_end: str
    after: tuple[str, ...]
    next_part: str
    trims: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls as Python writes them, name(key=value), in a list or on lines of their own. after:
    what may follow the last one.
    """

    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """A text of calls as a model must write it if it has no choice: `before`, and for each call
    `begin`, the name, `middle`, the arguments as JSON and `end`, with `between` in between; None:
    there is one call only. Special tokens stand in it as their texts.
    """

    begin: str
    middle: str
    end: str
    before: str = ""
    between: str | None = None
    after: str = ""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How calls are written. signs: the chat template of such a model holds all of them.

    marks: what calls begin with. is_bare: the answer may begin with one without a mark. bodies:
    what may follow a mark, the first that fits. frame: of an answer that must call; None where it
    is a plain list, which PLAIN reads. in_channels: all of the answer is in gpt-oss's channels.
    """

    name: str
    signs: tuple[str, ...]
    marks: tuple[str, ...] = ()
    bodies: tuple[Objects | Named | Tagged | Calls, ...] = ()
    frame: Frame | None = None
    is_bare: bool = False
    in_channels: bool = False


def listed(begin: str = "", end: str = "") -> Frame:
    """A list of objects between two marks."""
    return Frame('{"name": "', '", "arguments": ', "}", f"{begin}[", ", ", f"]{end}")


LIST = Objects("[", ",", ("]",))
MISTRAL_CALL = Named(
    rf"{SPACES}{NAME}(?:\[CALL_ID\][a-zA-Z0-9]{{0,16}})?(?:\[ARGS\])?{SPACES}(?={{)"
)
PLAIN = ToolSyntax("list", (), bodies=(LIST,), frame=listed(), is_bare=True)
LFM2_END = ("]", "<|tool_call_end|>")
LFM2 = ToolSyntax(
    "lfm2",
    ("<|tool_call_start|>",),
    marks=("<|tool_call_start|>",),
    bodies=(Objects("[", ",", LFM2_END), Calls(LFM2_END)),
    # The model reads and writes both forms; a schema holds JSON.
    frame=listed("<|tool_call_start|>", "<|tool_call_end|>"),
)
PHI = ToolSyntax(
    "phi4_mini_json",
    ("functools[",),
    marks=("functools", "<|tool_call|>"),
    bodies=(Objects("[", ",", ("]", "<|/tool_call|>")), Objects(after=("<|/tool_call|>",))),
    frame=listed("functools"),
)
KEY = rf'{SPACES}\[?{SPACES}\{{{SPACES}"'  # of the first call of a list, or of the next one
COHERE_ID = r'tool_call_id"\s?:\s?"[^"\\]{0,16}"\s?,\s?"'
KIMI_END = ("<|tool_call_end|>", "<|tool_calls_section_end|>")


HUNYUAN_END = ("</tool_call>", "</tool_calls>")
# The template of the publisher, and that of vLLM, which asks for a list.
HUNYUAN = ToolSyntax(
    "hunyuan_a13b",
    ("<tool_calls>", "<tool_call>function_name"),
    marks=("<tool_calls>", "<tool_call>"),
    bodies=(
        Objects("[", ",", ("]", "</tool_calls>")),
        Named(
            rf"{SPACES}(?:<tool_call>)?{NAME}{SPACES}```json{SPACES}(?={{)", ("```", *HUNYUAN_END)
        ),
    ),
    frame=Frame(
        *("<tool_call>", "\n```json\n", "\n```</tool_call>"),
        before="<tool_calls>",
        between="\n",
        after="</tool_calls>",
    ),
)


def list_between(name: str, begin: str, end: str) -> ToolSyntax:
    """Of a model whose calls are a list of objects between two marks."""
    return ToolSyntax(
        name,
        (begin,),
        marks=(begin,),
        bodies=(Objects("[", ",", ("]", end)),),
        frame=listed(begin, end),
    )


def deep_mark(words: str) -> str:
    """A special token of DeepSeek's, whose bars and spaces are characters of their own."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


def deepseek(name: str, sign: str, before: str, middle: str, end: str) -> ToolSyntax:
    """Of DeepSeek's models. before: a name, behind the mark of its call. middle: name and
    arguments. end: what follows these.
    """
    begin, close = deep_mark("tool calls begin"), deep_mark("tool calls end")
    call, call_end = deep_mark("tool call begin"), deep_mark("tool call end")
    between = SPACES.join(re.escape(part) for part in middle.split())
    head = rf"{SPACES}(?:{call})?{SPACES}{before}{NAME}{SPACES}{between}{SPACES}(?={{)"
    return ToolSyntax(
        name,
        (DEEP_SEPARATOR, sign),
        marks=(begin, call),  # the second call has no mark of its own
        bodies=(Named(head, after=(*end.split(), call_end, close)),),
        frame=Frame(call + before, middle, end + call_end, begin, "\n" if end else "", close),
    )


DEEP_SEPARATOR = deep_mark("tool sep")


def functions_between(name: str, begin: str, end: str, trims: bool) -> ToolSyntax:
    """Of a model whose calls are <function=...> with a <parameter=...> for each argument."""
    return ToolSyntax(
        name,
        ("<function=", begin),
        marks=(begin, "<function="),  # the model may leave out the first
        bodies=(
            Tagged(
                rf"(?:{SPACES}<function=|(?<=<function=)){NAME}>",
                *("<parameter=", ">", "", "</parameter>"),
                after=("</function>", end),
                next_part=f"<parameter=|</function>{SPACES}{end}",
                trims=trims,
            ),
        ),
    )


# The first row whose signs are all in the template is its model's.
TOOL_SYNTAXES = (
    ToolSyntax(
        "openai",
        ("<|channel|>", "functions."),
        marks=("<|channel|>", "<|message|>", "<|call|>"),
        frame=Frame("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        in_channels=True,
    ),
    ToolSyntax(
        "glm45",
        ("<arg_key>", "<tool_call>"),
        marks=("<tool_call>",),
        bodies=(
            Tagged(
                rf"{SPACES}{NAME}{SPACES}(?=<)",
                *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
                after=("</tool_call>",),
                next_part="</tool_call>",
            ),
        ),
    ),
    functions_between("qwen3_coder", "<tool_call>", "</tool_call>", trims=True),
    functions_between("seed_oss", "<seed:tool_call>", "</seed:tool_call>", trims=False),
    ToolSyntax(
        "minimax_m2",
        ("<minimax:tool_call>",),
        marks=("<minimax:tool_call>", '<invoke name="'),  # the second call has no mark of its own
        bodies=(
            Tagged(
                rf'(?:{SPACES}<invoke name="|(?<=<invoke name=")){NAME}">',
                *('<parameter name="', '">', "", "</parameter>"),
                after=("</invoke>", "</minimax:tool_call>"),
                next_part=f'<parameter name="|</invoke>{SPACES}(?:</minimax|<invoke)',
            ),
        ),
    ),
    ToolSyntax(
        "muse_glimmer",
        ("<atem:function_calls>",),
        marks=("<atem:function_calls>", '<atem:invoke name="'),  # as of minimax_m2
        bodies=(
            Tagged(
                # A template may show a tool as a space of names that has one of the same name.
                rf'(?:{SPACES}<atem:invoke name="|(?<=<atem:invoke name=")){LAZY_NAME}(?:\.\1)?">',
                *('<atem:parameter name="', '">', "", "</atem:parameter>"),
                after=("</atem:invoke>", "</atem:function_calls>"),
                next_part=rf'<atem:parameter name="|</atem:invoke>{SPACES}(?:</atem|<atem:i)',
            ),
        ),
    ),
    HUNYUAN,
    ToolSyntax(
        "hermes",
        ("<tool_call>",),
        marks=("<tool_call>",),
        bodies=(Objects(after=("</tool_call>",)),),
        frame=Frame('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    ),
    ToolSyntax(
        "gemma4",
        ("<|tool_call>", "call:"),
        marks=("<|tool_call>",),
        bodies=(Named(rf"{SPACES}call:{NAME}{SPACES}(?={{)", ("<tool_call|>",), quote='<|"|>'),),
    ),
    ToolSyntax(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        marks=("[TOOL_CALLS]",),
        bodies=(LIST, MISTRAL_CALL),
        frame=Frame("[TOOL_CALLS]", "[ARGS]", "", between=""),
    ),
    ToolSyntax(
        "mistral",
        ("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        bodies=(LIST, MISTRAL_CALL),
        frame=listed("[TOOL_CALLS]"),
    ),
    replace(
        PHI,
        signs=("<|tool_call|>", "<|/tool_call|>"),
        frame=Frame('<|tool_call|>{"name": "', '", "arguments": ', "}<|/tool_call|>", between=""),
    ),
    PHI,
    ToolSyntax(
        "granite",
        ("<|tool_call|>",),
        marks=("<|tool_call|>", "<tool_call>"),
        bodies=(LIST,),
        frame=listed("<|tool_call|>"),
    ),
    ToolSyntax(
        "llama3_json",
        ('"parameters":', "ipython"),
        marks=("<|python_tag|>",),
        bodies=(Objects(between=";"),),
        frame=Frame('{"name": "', '", "parameters": ', "}", between="; "),
        is_bare=True,
    ),
    ToolSyntax(
        "kimi_k2",
        ("<|tool_calls_section_begin|>",),
        marks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        bodies=(
            Named(
                rf"{SPACES}(?:<\|tool_call_begin\|>)?{SPACES}functions\.{NAME}:[0-9]{{1,4}}{SPACES}"
                rf"<\|tool_call_argument_begin\|>{SPACES}(?={{)",
                after=KIMI_END,
            ),
        ),
        frame=Frame(
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            before="<|tool_calls_section_begin|>",
            after="<|tool_calls_section_end|>",
        ),
    ),
    deepseek("deepseek_v3", "```json", f"function{DEEP_SEPARATOR}", "\n```json\n", "\n```"),
    deepseek("deepseek_v31", "", "", DEEP_SEPARATOR, ""),
    ToolSyntax(
        "cohere_command3",
        ("<|START_ACTION|>",),
        marks=("<|START_ACTION|>",),
        bodies=(
            Named(
                rf'{KEY}(?:{COHERE_ID})?tool_name"\s?:\s?"{NAME}"\s?,\s?"parameters"\s?:\s?(?={{)',
                after=("}",),
                between=",",
                end=("]", "<|END_ACTION|>"),
            ),
        ),
        frame=Frame(
            '{"tool_call_id": "0", "tool_name": "',
            '", "parameters": ',
            "}",
            before="<|START_ACTION|>[",
            between=", ",
            after="]<|END_ACTION|>",
        ),
    ),
    ToolSyntax(
        "apertus",
        ("<|tools_prefix|>",),
        marks=("<|tools_prefix|>",),
        bodies=(
            Named(
                rf'{KEY}{NAME}"{SPACES}:{SPACES}(?={{)',
                after=("}",),
                between=",",
                end=("]", "<|tools_suffix|>"),
            ),
        ),
        frame=Frame('{"', '": ', "}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    ),
    replace(HUNYUAN, signs=("<tool_calls>",), frame=listed("<tool_calls>", "</tool_calls>")),
    list_between("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>"),
    ToolSyntax(
        "olmo3",
        ("<function_calls>",),
        marks=("<function_calls>",),
        bodies=(Calls(("]", "</function_calls>")),),
    ),
    LFM2,
    # Templates of LFM2 and of LFM2.5 that show tools, and no call.
    replace(LFM2, signs=("<|tool_list_start|>",)),
    replace(LFM2, signs=("List of tools: [",)),
)
BY_NAME = {syntax.name: syntax for syntax in TOOL_SYNTAXES}
# vLLM's other names of the same forms.
BY_NAME |= dict.fromkeys(("qwen3_json", "granite4"), BY_NAME["hermes"])
BY_NAME |= dict.fromkeys(("glm47", "poolside_v1"), BY_NAME["glm45"])
BY_NAME |= {"cohere_command4": BY_NAME["cohere_command3"]}
BY_NAME |= {"qwen3_xml": BY_NAME["qwen3_coder"], "llama4_json": BY_NAME["llama3_json"]}


def syntax_of(template: str) -> ToolSyntax | None:
    """How the model of a chat template writes calls; None if it is not known."""
    fits = (row for row in TOOL_SYNTAXES if all(sign in template for sign in row.signs))
    return next(fits, None)
