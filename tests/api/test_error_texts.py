"""The errors that users meet first: each says what is wrong, the value, and what to do.

Each row is a mistake and the words that its text must have. The numbers are those of a list of
mistakes that was graded once; those that are no mistakes any more are in test_habits.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest

from nanoengine import LLM, EngineError, SamplingParams
from nanoengine.loading.checkpoint import CheckpointReader

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SETTINGS: dict[str, Any] = {"dtype": "float32", "kvcache_block_size": 8, "num_gpu_blocks": 40}
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CONFIG = {"architectures": ["LlamaForCausalLM"]}


@dataclass(frozen=True)
class Bench:
    """What a mistake needs: a loaded model, its folder, and a place for broken ones."""

    llm: LLM
    model: Path
    place: Path

    def folder(self, name: str, **files: dict[str, Any]) -> Path:
        """A folder with JSON files of these names."""
        made = self.place / name
        made.mkdir(exist_ok=True)
        for file, content in files.items():
            (made / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")
        return made

    def part_of_a_gguf(self) -> Path:
        """The first of two files."""
        path = self.place / "m-00001-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    def changing_checkpoint(self) -> None:
        """A file that another program cuts while it is read."""
        path = self.folder("changing") / "model.safetensors"
        shutil.copyfile(self.model / path.name, path)
        with CheckpointReader(path.parent) as reader:
            os.truncate(path, 1000)
            reader.tensor(min(reader.names()))

    def loaded(self, **settings: Any) -> None:
        """Load the model with these settings."""
        LLM(self.model, **settings).close()

    def asked(self, prompt: Any, **settings: Any) -> None:
        """Ask a model with other settings than the loaded one's."""
        with LLM(self.model, **SETTINGS | settings) as llm:
            llm.generate(prompt, use_tqdm=False)

    def said(self, content: Any, role: str = "user", **rest: Any) -> None:
        """A conversation of one message."""
        message = {"role": role, "content": content}
        self.llm.chat([message], SamplingParams(max_tokens=1), use_tqdm=False, **rest)


Mistake = Callable[[Bench], object]
ROWS: dict[str, tuple[Mistake, tuple[str, ...]]] = {
    "1 misspelt setting": (
        lambda b: b.loaded(gpu_memory_utilisation=0.5),
        ("did you mean 'gpu_memory_utilization'?",),
    ),
    "2 code_revision": (
        lambda b: b.loaded(code_revision="main"),
        ("code from a checkpoint is never run",),
    ),
    "3 load_in_4bit": (lambda b: b.loaded(load_in_4bit=True), ("4 bits (GGUF",)),
    "4 cpu_offload_gb": (
        lambda b: b.loaded(cpu_offload_gb=4),
        ("offloads weights", "enable_cpu_offload=True"),
    ),
    "5 speculative_config": (
        lambda b: b.loaded(speculative_config={}),
        ('speculative="ngram:4"',),
    ),
    "6 top_p=0": (lambda b: SamplingParams(top_p=0), ("(0, 1]", "temperature=0 for greedy")),
    "7 misspelt model": (lambda b: LLM("smollm2-135M"), ("did you mean 'smollm2-135m'?",)),
    "8 longer than the model": (
        lambda b: b.asked([5] * 600, num_gpu_blocks=80),
        ("600 tokens", "limit is 512", "shorten the prompt"),
    ),
    "9 longer than the KV": (
        lambda b: b.asked([5] * 400),
        ("400 tokens", "limit is 320", "set enable_cpu_offload=True and kv_offload_gib="),
    ),
    "10 max_new_tokens": (
        lambda b: SamplingParams(max_new_tokens=5),  # type: ignore[call-arg]
        ("'max_new_tokens'", "here it is max_tokens"),
    ),
    "10 do_sample in a dict": (
        lambda b: b.llm.generate("a", {"do_sample": False}),
        ("'do_sample'", "temperature=0 takes the likeliest token"),
    ),
    "11 guided_json": (
        lambda b: SamplingParams(guided_json={}),  # type: ignore[call-arg]
        ("'guided_json'", 'here it is structured_outputs={"json": schema}'),
    ),
    "12 too many parameters": (
        lambda b: b.llm.generate("a", [{"temperature": 0}, {"temperature": 1}]),
        ("1 prompt, but 2 sampling parameters", "one for all"),
    ),
    "12 no parameters": (
        lambda b: b.llm.generate("a", "greedy"),  # type: ignore[arg-type]
        ("a SamplingParams, a dict of its fields", "'greedy'"),
    ),
    "13 max_tokens in generate": (
        lambda b: b.llm.generate("a", max_tokens=5),  # type: ignore[call-arg]
        ("'max_tokens' of generate()", "SamplingParams(max_tokens="),
    ),
    "13 a call": (lambda b: b.llm("a"), ("llm.generate(prompt, SamplingParams(", "llm.chat")),
    "14 tools of another form": (
        lambda b: b.said("a", tools={"name": "f"}),
        ("tools must be a list of dicts", '"function"'),
    ),
    "14 tools without a place": (
        lambda b: b.said("a", tools=[{"name": "f"}]),
        ("chat template does not use tools",),
    ),
    "15 image": (
        lambda b: b.said([{"type": "text", "text": "a"}, IMAGE]),
        ("messages[0]['content'][1] is 'image_url'", "only text is read", "no images"),
    ),
    "15 content of another type": (
        lambda b: b.said(5),
        ("must be a string or a list of text parts", "int"),
    ),
    "16 unknown role": (
        lambda b: b.said("a", role="bot"),
        ("the role 'bot'", "system, user, assistant, tool", "may not know it"),
    ),
    "17 enable_lora": (
        lambda b: b.loaded(enable_lora=True),
        ("one LoRA adapter", "give its folder as lora"),
    ),
    "18 use_tqdm": (
        lambda b: b.loaded(use_tqdm=False),
        ("belongs to generate() and chat()", "use_tqdm=False"),
    ),
    "19 hf_token": (lambda b: b.loaded(hf_token="x"), ("HF_TOKEN", "hf auth login")),
    "19 download_dir": (lambda b: b.loaded(download_dir="x"), ("HF_HUB_CACHE",)),
    "20 n_ctx": (lambda b: b.loaded(n_ctx=4096), ("here it is max_model_len",)),
    "20 n_gpu_layers": (
        lambda b: b.loaded(n_gpu_layers=20),
        ("layers do not split", "enable_cpu_offload=True"),
    ),
    "21 too few GPUs": (
        lambda b: b.loaded(tensor_parallel_size=64, device="cuda"),
        ("=64 from cuda:0 on needs 64 GPUs", "PyTorch sees", "enable_cpu_offload=True"),
    ),
    "21 heads that do not divide": (
        lambda b: b.loaded(tensor_parallel_size=3),
        ("=3 does not divide", "4 heads and 2 KV heads", "1, 2, 4"),
    ),
    "22 Apple's GPU": (
        lambda b: b.loaded(device="mps"),
        ("'mps'", '"cpu"', "Apple's", "not supported"),
    ),
    "23 quantization of a checkpoint": (
        lambda b: b.loaded(quantization="awq"),
        ("'awq'", '"int8" (weights are quantised as they are loaded)', '"gguf" (the'),
    ),
    "23 tokenizer of the hub": (
        lambda b: b.loaded(tokenizer="Qwen/Qwen3-0.6B"),
        (
            "'Qwen/Qwen3-0.6B' has no tokenizer.json, as it is no folder",
            "hf download MODEL --include",
        ),
    ),
    "24 float16 on a CPU": (
        lambda b: b.loaded(dtype="fp16", device="cpu"),
        ("float16 is not supported on a CPU", "use bfloat16 or float32"),
    ),
    "25 no model": (
        lambda b: LLM(None),  # type: ignore[arg-type]
        ("no model was given", '"Qwen/Qwen3-0.6B"', ".gguf file", "got None"),
    ),
    "25 empty name": (lambda b: LLM(""), ("no model was given", '"smollm2-135m"', "got ''")),
    "26 LoRA": (
        lambda b: LLM(b.folder("lora", adapter_config={"base_model_name_or_path": "org/base"})),
        ("a LoRA adapter of 'org/base'", "this folder as lora"),
    ),
    "27 HQQ": (
        lambda b: LLM(b.folder("hqq", config=CONFIG | {"quantization_config": HQQ})),
        ("says 'hqq'", "not read", "16-bit original", 'quantization="int8"', "a GGUF"),
    ),
    "27 mixture of experts": (
        lambda b: LLM(b.folder("moe", config={"architectures": ["DeepseekForCausalLM"]})),
        ("DeepseekForCausalLM is a mixture of experts", "Qwen/Qwen3-4B", "Llama 2", "Qwen 3"),
    ),
    "27 images and text": (
        lambda b: LLM(b.folder("vl", config={"architectures": ["MllamaForConditionalGeneration"]})),
        ("images", "only text models", "google/gemma-3-1b-it"),
    ),
    "27 tag of Ollama": (
        lambda b: LLM("llama3.2:1b"),
        ("'llama3.2:1b'", "tag of Ollama", "meta-llama/Llama-3.2-1B-Instruct"),
    ),
    "27 GGUF at the hub": (
        lambda b: LLM("bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"),
        (
            "hf download bartowski/Llama-3.2-1B-Instruct-GGUF",
            '--include "*Q4_K_M*.gguf"',
            "give its path",
        ),
    ),
    "27 URL": (
        lambda b: LLM("https://huggingface.co/Qwen/Qwen3-0.6B"),
        ("page of a model", "give its id, 'Qwen/Qwen3-0.6B'"),
    ),
    "27 path": (lambda b: LLM("./models/my-model"), ("no model at './models/my-model'", "check")),
    "28 other arguments": (
        lambda b: b.llm.get_tokenizer().apply_chat_template([], return_dict=True),
        ("'return_dict' is not a variable of a chat template", "tokenize=True to a list"),
    ),
    "28 answer that has begun": (
        lambda b: b.llm.chat(
            [{"role": "user", "content": "a"}],
            continue_final_message=True,
        ),
        ("add_generation_prompt that is false", "goes on with the last one"),
    ),
    "28 several GPUs": (
        lambda b: b.loaded(pipeline_parallel_size=2),
        ("tensor_parallel_size is the only way for one engine to use several GPUs",),
    ),
    "29 list in a stream": (
        lambda b: b.llm.stream(["a"]),  # type: ignore[arg-type]
        ("a stream takes one prompt, got a list of 1", "open a stream for each"),
    ),
    "29 conversation in generate": (
        lambda b: b.llm.generate([{"role": "user", "content": "a"}], use_tqdm=False),
        ('"prompt" or "prompt_token_ids"', "use chat() or stream_chat()"),
    ),
    "31 file of weights": (
        lambda b: LLM(b.model / "model.safetensors"),
        ("a .safetensors file", "a Hugging Face folder or a .gguf file"),
    ),
    "33 bad prompt in a list": (
        lambda b: b.llm.generate(["a", [10**7]], use_tqdm=False),
        ("1 of 2 requests failed", "outputs[1].error: token id 10000000 is outside the vocabulary"),
    ),
    "34 revision": (
        lambda b: b.loaded(revision="v2"),
        ("main revision", "hf download MODEL --revision REVISION"),
    ),
    "35 part of a GGUF": (
        lambda b: LLM(b.part_of_a_gguf()),
        ("part 1 of 2", "part 2 is not beside it: get m-00002-of-00002.gguf"),
    ),
    "36 a file that changes": (
        Bench.changing_checkpoint,
        ("model.safetensors was changed while it was loaded (from", "to 1000 bytes"),
    ),
}
HQQ = {"quant_method": "hqq"}


@pytest.fixture(scope="module")
def bench(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with LLM(tiny("llama"), **SETTINGS) as llm:
        yield Bench(llm, tiny("llama"), tmp_path_factory.mktemp("mistakes"))


def text_after(mistake: Mistake, bench: Bench) -> str:
    """The text of the error, or of the only warning, that a user sees."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            mistake(bench)
        except EngineError as error:
            return f"{type(error).__name__}: {error}"
    (only,) = warned
    assert only.filename == __file__, "the warning must be shown at the user's line"
    return f"{only.category.__name__}: {only.message}"


@pytest.mark.some(4)
@pytest.mark.parametrize("name", ROWS)
def test_a_mistake_is_answered_in_words(bench: Bench, name: str) -> None:
    mistake, words = ROWS[name]
    text = text_after(mistake, bench)
    assert [word for word in words if word not in text] == [], text


def quoted_texts() -> list[str]:
    """The errors that the page for users quotes; "..." is what differs from case to case."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [" ".join(block.split()) for block in blocks]


def test_the_page_quotes_real_errors(bench: Bench) -> None:
    texts = {text_after(mistake, bench) for mistake, _ in ROWS.values()}
    quotes = quoted_texts()
    assert len(quotes) >= 12
    for quote in quotes:
        pattern = re.escape(quote).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, text, re.DOTALL) for text in texts), quote
