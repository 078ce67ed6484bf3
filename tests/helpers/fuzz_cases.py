"""The cases of benchmarks/proofs/fuzz.py: damaged files, odd settings and parameters, each made
from a target's name and a number alone.

A case returns what became of it, "accepted" or the name of the error of ours that refused it; any
other exception is a fault. `Damage` says whether a file's structure was changed, of which the rule
is: refused, or the tokens of the whole file.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from nasties import NASTIES
from schemas import random_schema

from nanoengine import LLM, SamplingParams
from nanoengine.config.engine import EngineConfig, make_config
from nanoengine.errors import EngineError, ModelLoadError
from nanoengine.loading.checkpoint import CheckpointReader, check_names, ignorable_tensors
from nanoengine.loading.generation_config import read_sampling_params
from nanoengine.loading.gguf.convert import convert_gguf
from nanoengine.loading.model_config import read_model_config
from nanoengine.models.weight_shapes import weight_shapes
from nanoengine.sampling_params import BeamSearchParams, StructuredOutputsParams
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.answer_pieces import merged
from nanoengine.text.chat_template import ChatTemplate
from nanoengine.text.grammar import Grammars
from nanoengine.text.reasoning import REASONING_SYNTAXES
from nanoengine.text.template_process import TemplateProcess
from nanoengine.text.tokenizer import Tokenizer
from nanoengine.text.tool_syntax import PLAIN, TOOL_SYNTAXES
from nanoengine.text.tools import ToolUse

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [65, 66, 67, 68]
SENTENCEPIECE = Path(__file__).parents[1] / "data" / "sentencepiece_ids.json"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "num_gpu_blocks": 4,
    "kvcache_block_size": 16,
    "num_threads": 1,
}
NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1]
JSON_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 10**12, 10**30, 1e308, "", "x", "silu", "\ud800"),
    *([], {}, [None], [[[]]], {"a": {}}, ["x"], [1, 2], {"content": 5}, {"id": "x"}, "x" * 1000),
]
GGUF_FILES = ("bytes.gguf", "pieces.gguf", "quantised.gguf")
JSON_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "model.safetensors.index.json"),
)
# What decides how a file is read; the rest are values, some of which nobody can know to be wrong.
STRUCTURE = {
    *("magic", "tensor count", "key count", "key length", "value type", "string length"),
    *("array type", "array length", "name length", "name", "num dims", "dim", "offset"),
}


class Field(NamedTuple):
    """A part of a GGUF's head."""

    position: int
    size: int
    what: str


class Damage(NamedTuple):
    """A damaged file. is_structural: only parts that decide how it is read were changed."""

    data: bytes
    is_structural: bool


SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_fields(data: bytes) -> list[Field]:
    """Every part of the head of a whole GGUF, in order."""
    fields: list[Field] = []

    def take(size: int, what: str) -> int:
        position = fields[-1].position + fields[-1].size if fields else 0
        fields.append(Field(position, size, what))
        return int.from_bytes(data[position : position + size], "little")

    def string(what: str) -> None:
        take(take(8, f"{what} length"), what)

    def value(kind: int) -> None:
        if kind == 8:
            string("string")
        elif kind == 9:
            inner = take(4, "array type")
            for _ in range(take(8, "array length")):
                value(inner)
        else:
            take(SCALARS[kind], "value")

    take(4, "magic")
    take(4, "version")
    num_tensors, num_keys = take(8, "tensor count"), take(8, "key count")
    for _ in range(num_keys):
        string("key")
        value(take(4, "value type"))
    for _ in range(num_tensors):
        string("name")
        for _ in range(take(4, "num dims")):
            take(8, "dim")
        take(4, "tensor type")
        take(8, "offset")
    return fields


def damaged_gguf(data: bytes, fields: list[Field], chance: random.Random) -> Damage:
    """One to three parts of the head changed, or bytes of it flipped, taken out or put in."""
    if chance.random() < 0.7:
        kinds: dict[str, list[Field]] = {}
        for field in fields:
            kinds.setdefault(field.what, []).append(field)
        num_changed = chance.choice([1, 1, 1, 2, 3])
        picked = [chance.choice(kinds[chance.choice([*kinds])]) for _ in range(num_changed)]
        changed = bytearray(data)
        for field in picked:
            old = changed[field.position : field.position + field.size]
            changed[field.position : field.position + field.size] = _another(bytes(old), chance)
        return Damage(bytes(changed), all(field.what in STRUCTURE for field in picked))
    end = fields[-1].position + fields[-1].size
    return Damage(_scrambled(data[:end], chance) + data[end:], False)


def _another(old: bytes, chance: random.Random) -> bytes:
    """Other bytes in the same place: a number near the old one, a famous one, or noise."""
    size = len(old)
    if not size:
        return old
    number, span = int.from_bytes(old, "little"), 1 << (8 * size)
    near = [number + 1, number - 1, number * 2, number // 2, number ^ (1 << chance.randrange(8))]
    new = chance.choice([*near, *NUMBERS, chance.randrange(span)])
    return (new % span).to_bytes(size, "little")


def _scrambled(data: bytes, chance: random.Random) -> bytes:
    """A few bytes flipped, taken out, put in or repeated, or the end cut off."""
    for _ in range(chance.choice([1, 1, 2, 5])):
        at, count = chance.randrange(len(data) or 1), chance.choice([1, 1, 2, 4, 8, 64])
        kind = chance.randrange(5)
        part = data[at : at + count]
        if kind == 0:
            noise = bytes(byte ^ (1 << chance.randrange(8)) for byte in part)
            data = data[:at] + noise + data[at + count :]
        elif kind == 1:
            data = data[:at] + data[at + count :]
        elif kind == 2:
            data = data[:at] + chance.randbytes(count) + data[at:]
        elif kind == 3:
            data = data[:at] + part * 2 + data[at + count :]
        elif chance.random() < 0.2:
            data = data[:at]
    return data


def damaged_json(content: Any, chance: random.Random) -> Any:
    """A copy with one entry changed, renamed, taken out or put in, anywhere in it."""
    content = json.loads(json.dumps(content))
    places = [*_places(content)]
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        holder, key = chance.choice(places)
        kind = chance.randrange(6)
        try:
            if kind == 0:
                del holder[key]
            elif kind == 1:
                holder[key] = [holder[key]] * chance.choice([1, 2, 50])
            elif kind == 2 and isinstance(holder, dict):
                holder[chance.choice(["", "x", "rope_type", "id", "type"])] = holder.pop(key)
            elif kind == 3 and isinstance(holder[key], int | float):
                holder[key] = chance.choice([-holder[key], holder[key] * 2, holder[key] + 1])
            else:
                holder[key] = chance.choice(JSON_VALUES)
        except (LookupError, OverflowError):  # an earlier change took it away
            continue
    return content


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every (dict or list, key or index) in the content, of long lists only the first few."""
    keys = list(content) if isinstance(content, dict) else range(min(len(content), 20))
    for key in keys[:50] if isinstance(keys, list) else keys:
        yield content, key
        if isinstance(content[key], dict | list):
            yield from _places(content[key])


@dataclass
class Bench:
    """Where the cases of one child work: copies of the whole files, and a folder to write in."""

    seeds: Path
    scratch: Path

    def __post_init__(self) -> None:
        self.folder = self.scratch / "model"
        shutil.copytree(self.seeds / "folder", self.folder)
        if (self.seeds / "cache").is_dir():  # compiled kernels
            shutil.copytree(self.seeds / "cache", self.scratch / "cache")
        self.whole = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.ggufs = {name: (self.seeds / name).read_bytes() for name in GGUF_FILES}
        self.fields = {name: gguf_fields(data) for name, data in self.ggufs.items()}
        self.templates = json.loads((self.seeds / "templates.json").read_text())
        self.tokens: dict[str, list[int]] = json.loads((self.seeds / "tokens.json").read_text())
        self.process = TemplateProcess(seconds=0.5)
        self.grammars = Grammars(Tokenizer.from_folder(self.folder), 272, [1, 3])

    def put(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def mend(self, name: str) -> None:
        """The file as it was; gone if it was not there."""
        if name in self.whole:
            self.put(name, self.whole[name])
        else:
            (self.folder / name).unlink(missing_ok=True)

    def read_folder(self) -> None:
        read_folder(self.folder)


def read_folder(folder: Path) -> None:
    """All that is read of a folder before weights are."""
    config = read_model_config(folder)
    read_sampling_params(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.decode(tokenizer.encode("Hello, 12 é漢🙂\n"))
    with CheckpointReader(folder) as reader:
        check_names(weight_shapes(config), reader, ignorable_tensors(config))


Case = Callable[[Bench, random.Random], None]


def read_gguf(bench: Bench, chance: random.Random) -> None:
    """The head of a GGUF, all that is made of it, and back to text."""
    name = chance.choice(GGUF_FILES)
    source, target = bench.scratch / "damaged.gguf", bench.scratch / "converted"
    source.write_bytes(damaged_gguf(bench.ggufs[name], bench.fields[name], chance).data)
    target.mkdir()
    try:
        convert_gguf(source, target)
        read_folder(target)
    finally:
        shutil.rmtree(target)


def read_json_files(bench: Bench, chance: random.Random) -> None:
    """One of the JSON files of a folder, changed as JSON or as bytes."""
    name = chance.choice(JSON_FILES)
    data = bench.whole.get(name, b'{"weight_map": {"a": "model.safetensors"}}')
    if chance.random() < 0.7:
        changed = damaged_json(json.loads(data), chance)
        bench.put(name, json.dumps(changed).encode("utf-8", "surrogatepass"))
    else:
        bench.put(name, _scrambled(data, chance))
    try:
        bench.read_folder()
    finally:
        bench.mend(name)


def read_safetensors(bench: Bench, chance: random.Random) -> None:
    """The head of a safetensors file: its length, its JSON, offsets and shapes."""
    damage = damaged_safetensors(bench.whole["model.safetensors"], chance)
    bench.put("model.safetensors", damage.data)
    try:
        config = read_model_config(bench.folder)
        with CheckpointReader(bench.folder) as reader:
            check_names(weight_shapes(config), reader, ignorable_tensors(config))
            for name in reader.names():
                reader.tensor(name).float().sum()
    finally:
        bench.mend("model.safetensors")


def damaged_safetensors(data: bytes, chance: random.Random) -> Damage:
    (size,) = struct.unpack("<Q", data[:8])
    head, rest = data[8 : 8 + size], data[8 + size :]
    kind = chance.random()
    if kind < 0.2:
        return Damage(_another(data[:8], chance) + data[8:], True)
    if kind < 0.4:
        head = _scrambled(head, chance)
        return Damage(struct.pack("<Q", len(head)) + head + rest, False)
    content = json.loads(head)
    name = chance.choice([name for name in content if name != "__metadata__"])
    key = chance.choice(["shape", "data_offsets", "shape", "data_offsets", "name"])
    if key == "name":
        content[chance.choice(["x", *content])] = content.pop(name)
    else:
        numbers = content[name][key]
        at = chance.randrange(len(numbers))
        near = [numbers[at] + 1, numbers[at] - 1, numbers[at] * 2, 0]
        numbers[at] = chance.choice([*near, *NUMBERS])
    head = json.dumps(content).encode()
    return Damage(struct.pack("<Q", len(head)) + head + rest, key != "name")


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 99 %}" + "{% set x = x ~ x %}" * 40,
    *("{{ 'a' * 10**10 }}", "{{ 10 ** (10 ** 8) }}", "{{ '%1000000000d' % 1 }}"),
    *("{{ messages.__class__ }}", "{{ messages[99].content }}", "{{ undefined.x.y }}"),
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]
SNIPPETS = [
    *("{% if", "%}", "{{", "}}", "{% endfor %}", "{% for m in messages %}", "{# ", "|tojson", "'"),
    *("{% generation %}", "\n", "    ", "loop.", "{% raw %}", "\\", "\x00", "é", "|join("),
    "namespace(",
]


def render_templates(bench: Bench, chance: random.Random) -> None:
    """A template spliced with parts of others, and now and then one without an end."""
    source = chance.choice(bench.templates)
    for _ in range(chance.choice([0, 1, 1, 2, 6])):
        at, count = chance.randrange(len(source) + 1), chance.choice([0, 1, 5, 30])
        other = chance.choice(bench.templates)
        start = chance.randrange(len(other))
        put = chance.choice([chance.choice(SNIPPETS), other[start : start + count], ""])
        source = source[:at] + put + source[at + count :]
    if chance.random() < 0.01:
        source += chance.choice(BOMBS)
    messages: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if chance.random() < 0.3:
        messages = damaged_json(messages, chance)
    ChatTemplate(source, bench.process).render(messages, True, {"bos_token": "<s>"}, {})


WORSE: list[dict[str, Any]] = [
    *({"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"multipleOf": 999983, "type": "integer"}),
    *({"minLength": 10**9}, {"maxItems": 10**6}, {"minimum": -1e308, "maximum": 1e308}),
    {"allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdefghijklmnop"]},
    *({"pattern": "(a+)+$"}, {"pattern": "((a{1,99}){1,99}){1,99}"}, {"enum": ["x" * 9] * 999}),
]
PIECES = ("(", ")", "[", "]", "{1,99}", "*", "+", "|", "&", "~", ".", "\\", "a", "é", '"x"', "/a/")
RULES = (
    "start: ",
    "root ::= ",
    "\na: ",
    " a ",
    "\nB: ",
    " B ",
    "%json ",
    '{"type":"object"}',
    "\n",
)
MOST_S = 15.0  # of one form: twice the limit of its compilation, and a few masks


def compile_forms(bench: Bench, chance: random.Random) -> None:
    """A random schema, made worse and damaged, or a text of odd pieces; and the masks of a few
    tokens.
    """
    kind = chance.choice(["json", "json", "regex", "grammar"])
    form: Any = "".join(
        chance.choices(PIECES + RULES * (kind == "grammar"), k=chance.randint(1, 30))
    )
    if kind == "json":
        form = random_schema(chance.randrange(10**6))
        for _ in range(chance.choice([0, 1, 2])):
            form = {**form, **chance.choice(WORSE)} if chance.random() < 0.5 else {"items": form}
        form = damaged_json(form, chance) if chance.random() < 0.5 else form
    begun = time.monotonic()
    try:
        state = bench.grammars.state_of(StructuredOutputsParams(**{kind: form}))
        for _ in range(20):
            (mask,) = state.masks(())
            allowed = [i for i in range(272) if mask[i >> 3] >> (i & 7) & 1]
            if not allowed or state.accept(chance.choice(allowed)):
                break
    finally:
        assert time.monotonic() - begun < MOST_S, "a form takes too long"


SIGNS = (
    *("<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{", "}", '"', "\\", "\n", " "),
    *("<function=f>", "</function>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[", "]", ",", ";", "f", "[ARGS]", "é", "1"),
    *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "to=functions.f", "analysis"),
    *('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '[TOOL_CALLS]f{"a": "}"}'),
    *("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", '{"arguments": {},'),
    *("<tool_call><function=f><parameter=a>1</parameter></function></tool_call>", '"name": "f"}'),
    *("<|tool_call_start|>", "<|tool_call_end|>", "f(a=", "'", "\\u00e9", ")", "(", "f()", "="),
    ":",
    *('<invoke name="f">', '<parameter name="a">', "</invoke>", "<seed:tool_call>"),
    *("<minimax:tool_call>", "<tool_calls>", "<function_calls>", "<|tool_calls_section_begin|>"),
    *("<think>", "</think>", "<|python_tag|>", "<tool_c", '"name"', '"arguments": "{}"'),
)
ANSWER_S = 5.0


def parse_answers(bench: Bench, chance: random.Random) -> None:
    """An answer of odd pieces, in two ways to cut it; a few pieces come very often."""
    often = [[sign] * chance.choice([1, 1, 1, 300]) for sign in chance.choices(SIGNS, k=20)]
    text = "".join(chance.choices(SIGNS, k=5) + [sign for run in often for sign in run])
    syntax = chance.choice([*TOOL_SYNTAXES, PLAIN])
    thoughts = chance.choice([None, *REASONING_SYNTAXES])
    parsers = ChatParsers(syntax, thoughts, shows_tools=True)
    use = ToolUse(({"type": "function", "function": {"name": "f"}},))
    found = []
    for size in (len(text), chance.choice([1, 7, 50])):
        begun = time.process_time()
        parser = parsers.parser("<think>", use)
        parts = [parser.read(text[at : at + size], False) for at in range(0, len(text), size)]
        found.append(merged([*chain(*parts), *parser.read("", is_last=True)]))
        assert time.process_time() - begun < ANSWER_S, "an answer takes too long"
    assert found[0] == found[1], "the parts of an answer change what it says"


def _odd(fields: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    picked = chance.sample(sorted(fields), chance.choice([1, 1, 2, 4]))
    return {name: chance.choice(NASTIES) for name in picked}


def make_settings(bench: Bench, chance: random.Random) -> None:
    """Odd values of any types for settings."""
    given = _odd(EngineConfig.__dataclass_fields__, chance)
    model = given.pop("model", "smollm2-135m")
    if chance.random() < 0.05:
        given[chance.choice(["", "x" * 10_000, "max_len", "gpu"])] = 1
    make_config(model, given)


def make_params(bench: Bench, chance: random.Random) -> None:
    """Odd values of any types for parameters."""
    kind = chance.choice([SamplingParams, SamplingParams, BeamSearchParams])
    given = _odd(kind.__dataclass_fields__, chance)
    if kind is BeamSearchParams:
        given = {"beam_width": 2, "max_tokens": 3} | given
    kind(**given)


def load_folder(bench: Bench, chance: random.Random) -> None:
    """A whole load and a greedy text: damaged heads of safetensors, JSON, or bytes of weights."""
    whole = bench.whole["model.safetensors"]
    kind, name = chance.random(), "model.safetensors"
    if kind < 0.4:
        damage = damaged_safetensors(whole, chance)
    elif kind < 0.6:
        damage = Damage(_flipped(whole, 8 + struct.unpack("<Q", whole[:8])[0], chance), False)
    else:
        name = chance.choice(JSON_FILES[:4])
        changed = damaged_json(json.loads(bench.whole[name]), chance)
        damage = Damage(json.dumps(changed).encode("utf-8", "surrogatepass"), False)
    bench.put(name, damage.data)
    try:
        _check_tokens(bench, bench.folder, damage, "folder")
    finally:
        bench.mend(name)


def load_gguf(bench: Bench, chance: random.Random) -> None:
    """A whole load and a greedy text of a GGUF with a damaged head, or flipped bits of weights."""
    name = chance.choice(GGUF_FILES)
    data, fields = bench.ggufs[name], bench.fields[name]
    if chance.random() < 0.7:
        damage = damaged_gguf(data, fields, chance)
    else:
        damage = Damage(_flipped(data, fields[-1].position + 8, chance), False)
    path = bench.scratch / "damaged.gguf"
    path.write_bytes(damage.data)
    try:
        _check_tokens(bench, path, damage, name)
    finally:
        shutil.rmtree(bench.scratch / "cache" / "nanoengine" / "models", ignore_errors=True)


def _flipped(data: bytes, begin: int, chance: random.Random) -> bytes:
    """Bits of tensors flipped, from byte `begin` on."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 4, 64])):
        changed[chance.randrange(begin, len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _check_tokens(bench: Bench, model: Path, damage: Damage, whole: str) -> None:
    with LLM(model, **SETTINGS) as llm:
        output = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]
        vocab = llm.llm_engine.model_config.vocab_size
    if output.error is not None:
        raise output.error
    assert all(0 <= token < vocab for token in output["token_ids"])
    if damage.is_structural:
        assert output["token_ids"] == bench.tokens[whole], "a damaged structure gave other tokens"


PARSE: dict[str, tuple[Case, int]] = {
    "gguf": (read_gguf, 25),
    "json": (read_json_files, 25),
    "safetensors": (read_safetensors, 15),
    "templates": (render_templates, 10),
    "settings": (make_settings, 10),
    "params": (make_params, 10),
    "grammars": (compile_forms, 5),
    "answers": (parse_answers, 10),
}
LOAD: dict[str, tuple[Case, int]] = {"load folder": (load_folder, 50), "load gguf": (load_gguf, 50)}
CASES = PARSE | LOAD


def run_case(bench: Bench, target: str, number: int) -> str:
    """What became of case `number` of a target. Raises whatever is no error of ours."""
    chance = random.Random(f"{target}:{number}")
    try:
        CASES[target][0](bench, chance)
    except (EngineError, ModelLoadError) as error:
        message = str(error)
        assert message, "an error without words"
        return type(error).__name__
    return "accepted"


def make_seeds(folder: Path) -> None:
    """The whole files that cases damage, and the tokens that they give; this computes."""
    from gguf import GGMLQuantizationType
    from gguf_model import GGUFModel
    from tiny_model import CHAT_TEMPLATE, TinyModel
    from tiny_models import TINY

    TINY["llama"](folder / "folder")
    model = GGUFModel(folder / "folder")
    model.write(folder / "bytes.gguf")
    model.types = {
        name: GGMLQuantizationType.Q8_0
        for name, values in model.tensors.items()
        if values.ndim == 2 and values.shape[-1] % 32 == 0
    }
    model.write(folder / "quantised.gguf")
    recorded = json.loads(SENTENCEPIECE.read_text())
    TinyModel(settings={"vocab_size": len(recorded["tokens"])})(folder / "wide")
    wide = GGUFModel(folder / "wide")
    wide.tokens, wide.token_types = recorded["tokens"], recorded["types"]
    wide.settings |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [float(score) for score in recorded["scores"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    wide.write(folder / "pieces.gguf")
    templates = [CHAT_TEMPLATE, "{{ messages[0]['content'] }}", *TEMPLATES]
    (folder / "templates.json").write_text(json.dumps(templates))
    tokens = {}
    for name in ("folder", *GGUF_FILES):
        with LLM(folder / name, **SETTINGS) as llm:
            tokens[name] = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["token_ids"]
    (folder / "tokens.json").write_text(json.dumps(tokens))


TEMPLATES = [
    "{% set ns = namespace(last=none) %}{% for m in messages %}{% if m.role != ns.last %}"
    "{{ bos_token }}[{{ m.role|upper }}]{% endif %}{{ m.content|trim }}{% set ns.last = m.role %}"
    "{%- if loop.last and add_generation_prompt %}<go>{% endif -%}{% endfor %}",
    "{%- macro show(x) -%}{{ x|tojson }}{%- endmacro -%}{% for m in messages %}{{ show(m) }}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    "{{ strftime_now('%Y') }}",
    "{% generation %}{{ messages|map(attribute='content')|join(',') }}{% endgeneration %}",
]
