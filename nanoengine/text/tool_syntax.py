"""How families of models write calls of tools: a row for each, by vLLM's names of parsers.

Sources: the chat templates and model cards of Hermes 2 Pro, Qwen 2.5 to 3.5, Qwen3-Coder, Llama 3.1
to 3.3, Mistral, GLM 4.5, Gemma 4, Granite 3 and gpt-oss. tool_parser.py reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_NAME = 64  # characters of a tool's name, as OpenAI has it
NAME = rf"([a-zA-Z0-9_.-]{{1,{MAX_NAME}}})"
SPACES = r"\s{0,16}"
MAX_PART = 64


def head_of(name: str) -> str:
    """What a call as an object has before its arguments, and `name`, as a regular expression."""
    keys = rf'"(?:arguments|parameters)"{SPACES}:'
    return rf'\{{{SPACES}"name"{SPACES}:{SPACES}"{name}"{SPACES},{SPACES}{keys}'


@dataclass(frozen=True, slots=True)
class Objects:
    """Calls as {"name": ..., "arguments": {...}}; "parameters" does as well. before: the first one;
    between: two of them, where models may write spaces alone; "" if only one follows each mark;
    after: the last one.
    """

    before: str = ""
    between: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Named:
    """A call as its name and its arguments, an object. head: from the mark to that object, a
    regular expression whose group is the name.
    """

    head: str


@dataclass(frozen=True, slots=True)
class Tagged:
    """A call as its name and its arguments one by one, between tags.

    head: as in Named, up to the first argument. key, value: what a key and a value begin with;
    key_end, value_end: what follows them. after: what follows the last value. next_part: what a
    value whose end a model left out ends before, a regular expression of at most MAX_PART
    characters. trims: the line breaks around a value are not part of it.
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
class Bare:
    """A call as its name and an object whose keys have no quotes (bare_object.py).

    head: as in Named. quote: what stands before and after a text. after: follows the object.
    """

    head: str
    quote: str
    after: str


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
    bodies: tuple[Objects | Named | Tagged | Bare, ...] = ()
    frame: Frame | None = None
    is_bare: bool = False
    in_channels: bool = False


OBJECT = Frame('{"name": "', '", "arguments": ', "}")
LIST = Objects("[", ",", "]")
MISTRAL_CALL = Named(
    rf"{SPACES}{NAME}(?:\[CALL_ID\][a-zA-Z0-9]{{0,16}})?(?:\[ARGS\])?{SPACES}(?={{)"
)
PLAIN = ToolSyntax(
    "list", (), bodies=(LIST,), frame=replace(OBJECT, before="[", between=", ", after="]"),
    is_bare=True,
)  # fmt: skip
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
    ToolSyntax(
        "qwen3_coder",
        ("<function=", "<tool_call>"),
        marks=("<tool_call>", "<function="),  # the model may leave out the first
        bodies=(
            Tagged(
                rf"(?:{SPACES}<function=|(?<=<function=)){NAME}>",
                *("<parameter=", ">", "", "</parameter>"),
                after=("</function>", "</tool_call>"),
                next_part=f"<parameter=|</function>{SPACES}</tool_call>",
                trims=True,
            ),
        ),
    ),
    ToolSyntax(
        "hermes",
        ("<tool_call>",),
        marks=("<tool_call>",),
        bodies=(Objects(after="</tool_call>"),),
        frame=Frame('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n"),
    ),
    ToolSyntax(
        "gemma4",
        ("<|tool_call>", "call:"),
        marks=("<|tool_call>",),
        bodies=(Bare(rf"{SPACES}call:{NAME}{SPACES}(?={{)", '<|"|>', "<tool_call|>"),),
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
        frame=replace(OBJECT, before="[TOOL_CALLS][", between=", ", after="]"),
    ),
    ToolSyntax(
        "granite",
        ("<|tool_call|>",),
        marks=("<|tool_call|>", "<tool_call>"),
        bodies=(LIST,),
        frame=replace(OBJECT, before="<|tool_call|>[", between=", ", after="]"),
    ),
    ToolSyntax(
        "llama3_json",
        ('"parameters":', "ipython"),
        marks=("<|python_tag|>",),
        bodies=(Objects(between=";"),),
        frame=Frame('{"name": "', '", "parameters": ', "}", between="; "),
        is_bare=True,
    ),
)
BY_NAME = {syntax.name: syntax for syntax in TOOL_SYNTAXES}


def syntax_of(template: str) -> ToolSyntax | None:
    """How the model of a chat template writes calls; None if it is not known."""
    fits = (row for row in TOOL_SYNTAXES if all(sign in template for sign in row.signs))
    return next(fits, None)
