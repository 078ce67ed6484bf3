"""Settings of the engine (EngineConfig), validated, and as keywords (Settings)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

from nanoengine.config.attention import ATTENTION_LIMITS
from nanoengine.errors import (
    MAX_COUNT,
    SEEDS,
    ConfigError,
    integer,
    is_one_of,
    near_name,
    number,
    path_text,
    shown,
    torch_name,
)
from nanoengine.text.known_names import SETTING, asks_what_is_done, unknown_name

GIB = 1 << 30
Init = TypeVar("Init", bound=Callable[..., None])
A_MODEL = 'a Hugging Face folder, a .gguf file, a hub id such as "Qwen/Qwen3-0.6B"'
_SPELLINGS = {"float32": ("fp32", "float"), "bfloat16": ("bf16",), "float16": ("fp16", "half")}
DTYPES = {"auto": "auto"} | {n: name for name, ns in _SPELLINGS.items() for n in (name, *ns)}
MAX_GUESSES = 64
# Rows whose logits any step has room for: what two texts whose forms leave one way to go on guess
# in a step, and as many tokens of prompts as are scored at once.
LEAST_SAMPLED = 32
WITH_DRAFT_MODEL = "draft:4"
AUTO_SPECULATIVE, DEFAULT_SPECULATIVE = "ngram:8+resident:8", "resident:8"
MAX_THREADS = 1024
MAX_RANKS = 64
MAX_GIB = 1 << 20
FLAGS = ("enable_prefix_caching", "enforce_eager", "measure_speed", "debug_kv")
DEVICE_NAMES = r"auto|cpu|(cuda|xpu|npu)(:(0|[1-9][0-9]{0,2}))?"
# A setting whose default is None may be None, whatever else these tables allow.
CHOICES = {
    "load_format": ("auto", "safetensors", "gguf", "dummy"),
    "attention_backend": ("auto", *ATTENTION_LIMITS),
    "quantization": ("none", "int8", "gguf"),
    "activation_dtype": ("int8",),
    "offload_mode": ("auto", "stream", "in_place"),
    "kv_offload_dtype": ("int8", "bf12"),
    "generation_config": ("auto", "vllm"),
}
# Choices whose names do not say what they are.
MEANINGS = {
    "quantization": "None (AWQ, GPTQ, FP8, MXFP4, NVFP4, NF4: config.json names them), "
    '"none" (codes become numbers), "int8" (weights are quantised as they are loaded) or "gguf" '
    "(the codes of a GGUF are kept)",
    "generation_config": '"auto" (the model\'s), "vllm" or None (SamplingParams\' own defaults)',
}
# Lower and upper bound of every count.
COUNTS = {
    "max_model_len": (1, MAX_COUNT),
    "max_num_seqs": (1, MAX_COUNT),
    "max_num_batched_tokens": (1, MAX_COUNT),
    "num_gpu_blocks": (1, MAX_COUNT),
    "kvcache_block_size": (1, 1 << 20),
    "seed": SEEDS,
    "num_threads": (1, MAX_THREADS),
    "tensor_parallel_size": (1, MAX_RANKS),
    "max_num_partial_prefills": (1, MAX_COUNT),
    "max_long_partial_prefills": (1, MAX_COUNT),
    "long_prefill_token_threshold": (1, MAX_COUNT),
    "decode_reserve_blocks": (0, MAX_COUNT),
    "ring_slots": (2, 1 << 16),
    "slot_tokens": (1, MAX_COUNT),
}
# Exclusive upper bound of every budget, and its unit.
BUDGETS = {
    "kv_cache_gib": (MAX_GIB, "GiB"),
    "kv_offload_gib": (MAX_GIB, "GiB"),
    "stream_mib_per_step": (MAX_GIB << 10, "MiB"),
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Every setting of the engine; None: planned at start-up. COUNTS and BUDGETS hold their ranges.

    model: a Hugging Face folder, a .gguf file, a hub id ("organisation/model"), or a name in
    loading/packaged.py: "smollm2-135m", "gemma3-270m".
    tokenizer: another folder for it. chat_template: the path of a file of Jinja code, or the code,
    in place of the model's own.
    dtype: "auto", "float32", "bfloat16" or "float16". device: "auto", "cpu", "cuda",
    "cuda:N"; "xpu" (Intel) and "npu" (Ascend), which nobody has tried on such a device.
    max_model_len: most tokens of one request, prompt and output.
    max_num_seqs: most requests running at once.
    max_num_batched_tokens: most tokens computed in one step; longer prompts are chunked.
    gpu_memory_utilization: share of the device's memory for weights, activations and KV (GPU).
    kv_cache_gib: device memory for KV (None: on a GPU what gpu_memory_utilization leaves; on a CPU
    4 GiB, or half of the available memory if that is less); num_gpu_blocks: the same in blocks.
    kvcache_block_size: tokens of a KV block.
    enable_prefix_caching: reuse the KV of equal prompt prefixes.
    prefix_cache_file: keep cached prefixes in this file when the engine is closed, and read them
    from it when one starts. Not with kv_offload_dtype or several processes.
    enforce_eager: on a GPU, run decode steps without CUDA graphs. load_format: "auto",
    "safetensors", "gguf" or "dummy" (random weights of the right shapes). attention_backend: "auto"
    takes the first that can be used: on a GPU of "triton", "flash-attn", "varlen" (PyTorch's
    varlen_attn), "sdpa" (PyTorch's scaled_dot_product_attention) and "torch", on an "npu" of
    "ascend", "sdpa" and "torch", on a CPU of "c" and "torch" ("sdpa" on request). The split of a
    context into chunks changes the bits of "flash-attn", "varlen", "ascend" and "sdpa" only.
    quantization: None: checkpoints that are packed (AWQ, GPTQ, FP8, MXFP4, NVFP4, NF4) stay so, and
    a GGUF keeps its codes of 3 to 8 bits, embeddings and head, too, where kernels take
    them. "gguf" insists on these; "none" makes numbers of all codes. "int8",
    which is lossy, makes Q8_0 of weights: layers, embeddings and head.
    activation_dtype: None, or lossy: "int8" rounds rows to 8 bits, with a scale for each 32 values,
    before a product with weights that are codes of integers (CPU).
    seed: used for requests without a seed. num_threads: CPU threads (None: OMP_NUM_THREADS if it is
    set, else all cores that the process and its container may use and no other program keeps busy).
    tensor_parallel_size: processes that compute the model together, each with its heads and its
    rows of the weights, on CUDA GPUs each on one of its own from `device` on. num_threads,
    kv_cache_gib and kv_offload_gib are those of all.
    max_num_partial_prefills: most prompts that may be partly computed after a step.
    max_long_partial_prefills: most long prompts among them.
    long_prefill_token_threshold: a prompt with more uncomputed tokens than this is long; while
    others wait for prefill, a long one gets at most this many tokens of a step (None: half of
    max_num_batched_tokens).
    decode_reserve_blocks: blocks kept free for decodes when requests are admitted.
    enable_cpu_offload: keep KV that does not fit the device in host memory and read it from there
    (None: if kv_offload_gib or kv_offload_dtype is given).
    offload_mode: "stream" copies host blocks through a ring on the device, "in_place" (CPU only)
    reads them in host memory; "auto": in_place on a CPU, stream on a GPU.
    kv_offload_gib: host memory for KV (None: 4 GiB, or a quarter of the available memory if that is
    less). kv_offload_dtype: None, or a way to store host KV, which needs "stream". "bf12": bfloat16
    of which 12 bits a number come back over the link, exactly. "int8", lossy: 8 bits with a scale
    for each token and KV head, half the memory and link traffic of 16 bits; KV on the device stays
    exact, so the tokens affected depend on what else runs. ring_slots: buffers of the ring, at
    least 2.
    slot_tokens: tokens of one layer that a ring slot holds (None: 4096, on a GPU 16384).
    stream_mib_per_step: host KV that may be streamed per step, on average, beside requests that
    decode from the device (None: the amount that takes 0.6 of a short step, measured at start-up).
    measure_speed: measure decode steps at start-up with KV offload, about a second; False: no speed
    is predicted, and stream_mib_per_step is 32 where it is not given.
    speculative: guesses tokens and checks them in one forward pass; the output does not change.
    "off": one token a step. "ngram:K": up to K tokens per step and request, by prompt lookup.
    "resident:K": up to K for requests whose KV is streamed, or has half the bytes of the weights,
    by decode steps over a part of the KV on the device; "mtp:K": by the model's MTP head
    (multi-token prediction); "draft:K": by draft_model; all fewer where they do not pay.
    "ngram:K+resident:K", "ngram:K+mtp:K", "ngram:K+draft:K": lookup first. "auto": lookup and
    drafts over the KV on the device with K = 8. None: "resident:8" if KV is streamed and the plan
    says "the same bits in any batch", as on a CPU in bfloat16; all requests of a step then have no
    more guesses than max_num_seqs or 32, whichever is more; else "off".
    lora: a LoRA adapter of the model, as peft saves it: a folder or a hub id. It is added to
    weights as they are loaded; those of them that are codes become numbers.
    draft_model: a small model that guesses tokens for this one, as `model`: one with the same
    vocabulary, or the assistant of a Gemma 4. speculative is "draft:4" then, if it is not given.
    generation_config: default sampling parameters of requests. "auto": those of the model's
    generation_config.json; None or "vllm": SamplingParams().
    debug_kv: fill freed and undelivered KV with NaN and check that events order all accesses
    (slow). debug_copy_delay_ms: longest random delay before each copy (stream).

    Raises ConfigError with the value and the allowed ones.
    """

    model: str
    tokenizer: str | None = None
    chat_template: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    num_gpu_blocks: int | None = None
    kvcache_block_size: int = 256
    enable_prefix_caching: bool = True
    prefix_cache_file: str | None = None
    enforce_eager: bool = False
    load_format: str = "auto"
    attention_backend: str = "auto"
    quantization: str | None = None
    activation_dtype: str | None = None
    seed: int = 0
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    max_num_partial_prefills: int = 2
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int | None = None
    decode_reserve_blocks: int = 2
    enable_cpu_offload: bool | None = None
    offload_mode: str = "auto"
    kv_offload_gib: float | None = None
    kv_offload_dtype: str | None = None
    ring_slots: int = 4
    slot_tokens: int | None = None
    stream_mib_per_step: float | None = None
    measure_speed: bool = True
    speculative: str | None = None
    lora: str | None = None
    draft_model: str | None = None
    generation_config: str | None = None
    debug_kv: bool = False
    debug_copy_delay_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.model is None or (isinstance(self.model, str) and not self.model):
            named = f'{A_MODEL}, or a name such as "smollm2-135m"'
            raise ConfigError(f"no model was given: model must be {named}; got {self.model!r}")
        self._set("model", path_text("model", self.model))
        for name in ("tokenizer", "chat_template"):
            if getattr(self, name) is not None:
                self._set(name, path_text(name, getattr(self, name)))
        self._check_choices()
        self._check_lora()
        self._check_prefix_cache_file()
        self._check_draft_model()
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        self._check_counts()
        self._check_memory()
        self._check_offload()
        if not (self._guessers or is_one_of(self.speculative, ("off",))):
            raise ConfigError(
                'speculative must be "auto", "off", "ngram:K", "resident:K", "mtp:K", "draft:K", '
                '"ngram:K+resident:K", "ngram:K+mtp:K" or "ngram:K+draft:K" with K from 1 to '
                f"{MAX_GUESSES}, got {shown(self.speculative)}"
            )

    @property
    def asks_for_guesses(self) -> bool:
        """Whether `speculative` was set to guess."""
        return self.speculative not in (None, "off")

    @property
    def num_guesses(self) -> int:
        """Most tokens guessed by prompt lookup per step and request; 0: none."""
        return self._guessers.get("ngram", 0)

    @property
    def num_drafts(self) -> int:
        """Most tokens drafted with the KV on the device per step and request; 0: none."""
        return self._guessers.get("resident", 0)

    @property
    def num_mtp(self) -> int:
        """Most tokens guessed by the MTP head per step and request; 0: none."""
        return 0 if self.draft_model else self._guessers.get("mtp", 0)

    @property
    def num_assisted(self) -> int:
        """The same by the model that `draft_model` names; makers of assistants call that MTP."""
        guessers = self._guessers
        return guessers.get("draft", guessers.get("mtp", 0)) if self.draft_model else 0

    @property
    def most_drafts(self) -> int:
        """Most tokens that draft steps guess before a step and for each request."""
        return self.num_drafts or self.num_assisted

    @property
    def checked_rows(self) -> int:
        """Most rows with which a step checks the guesses of a request; 0: nobody asked for any."""
        return 1 + max(self._guessers.values()) if self.asks_for_guesses else 0

    @property
    def sampled_rows(self) -> int:
        """Most rows of a step that sample: the next token of each request, and what follows each of
        its guesses. If nobody asked for guesses, there are hardly more than requests.
        """
        wanted = max(LEAST_SAMPLED, self.max_num_seqs * max(1, self.checked_rows))
        return min(self.max_num_batched_tokens, wanted)

    @property
    def _guessers(self) -> Mapping[str, int]:
        return guessers_of(self.speculative) if isinstance(self.speculative, str | None) else {}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_choices(self) -> None:
        dtype = torch_name(self.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {shown(self.dtype)}")
        self._set("dtype", DTYPES[dtype])
        device = torch_name(self.device)
        if not re.fullmatch(DEVICE_NAMES, device):
            raise ConfigError(
                'device must be "auto", "cpu", "cuda", "xpu" or "npu", or with a number as in '
                f'"cuda:1", got {shown(self.device)}; other GPUs, Apple\'s too, are not supported'
            )
        self._set("device", device)
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            is_left_out = value is None and name in OPTIONAL
            if not is_left_out and not is_one_of(value, allowed):
                raise ConfigError(_bad_choice(name, value, allowed))

    def _check_counts(self) -> None:
        for name, (low, high) in COUNTS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            found = integer(value)
            if found is None or not low <= found <= high:
                raise ConfigError(
                    f"{name} must be an integer of at least {low} and at most {high}, "
                    f"got {shown(value)}"
                )
            self._set(name, found)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request computes a token in a "
                "step"
            )

    def _check_lora(self) -> None:
        if self.lora is None:
            return
        self._set("lora", path_text("lora", self.lora))
        if self.load_format == "dummy":
            raise ConfigError('a LoRA adapter needs weights, and load_format="dummy" reads none')

    def _check_prefix_cache_file(self) -> None:
        name = "prefix_cache_file"
        if self.prefix_cache_file is None:
            return
        self._set(name, path_text(name, self.prefix_cache_file))
        if not self.enable_prefix_caching:
            raise ConfigError(f"{name} needs enable_prefix_caching; leave one of them out")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"{name} is for one process, and tensor_parallel_size is "
                f"{shown(self.tensor_parallel_size)}; leave one of them out"
            )

    def _check_draft_model(self) -> None:
        """One alone asks for as many guesses as its publishers advise."""
        if self.draft_model is None:
            if "draft" in self._guessers:
                raise ConfigError(
                    f"speculative={shown(self.speculative)} guesses by another model: name it as "
                    "draft_model, a smaller one of the same family"
                )
            return
        self._set("draft_model", path_text("draft_model", self.draft_model))
        if self.speculative is None:
            self._set("speculative", WITH_DRAFT_MODEL)
        if self.num_drafts or not (self.num_assisted or self.speculative == "off"):
            raise ConfigError(
                f'a draft_model guesses with speculative="draft:K" or "ngram:K+draft:K", and it is '
                f"{shown(self.speculative)}; leave one of them out"
            )
        if self.num_assisted and self.tensor_parallel_size != 1:
            raise ConfigError(
                "a draft_model runs in one process, and tensor_parallel_size is "
                f"{shown(self.tensor_parallel_size)}; leave one of them out"
            )

    def _check_offload(self) -> None:
        """The size and the dtype of host KV turn KV offload on where the settings leave it open."""
        needs = [n for n in ("kv_offload_gib", "kv_offload_dtype") if getattr(self, n) is not None]
        asked = self.enable_cpu_offload
        if asked is not None and not isinstance(asked, bool):
            raise ConfigError(f"enable_cpu_offload must be True or False, got {shown(asked)}")
        if asked is False and needs:
            raise ConfigError(
                f"{needs[0]} needs enable_cpu_offload=True, and it is False; leave one of them out"
            )
        self._set("enable_cpu_offload", bool(asked or needs))
        if self.kv_offload_dtype is not None and self.offload_mode == "in_place":
            raise ConfigError(
                f"kv_offload_dtype={self.kv_offload_dtype!r} cannot be read in place; take "
                'offload_mode="stream", or leave kv_offload_dtype out'
            )

    def _check_memory(self) -> None:
        asked = self.gpu_memory_utilization
        share = number(asked)
        if share is None or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {shown(asked)}")
        self._set("gpu_memory_utilization", share)
        for name, (high, unit) in BUDGETS.items():
            value = getattr(self, name)
            found = number(value)
            if value is not None and (found is None or not 0 < found < high):
                raise ConfigError(
                    f"{name} must be a positive number of {unit} below {high}, got {shown(value)}"
                )
            self._set(name, found)
        asked = self.debug_copy_delay_ms
        delay = number(asked)
        if delay is None or not 0 <= delay <= 1000:
            raise ConfigError(f"debug_copy_delay_ms must be between 0 and 1000, got {shown(asked)}")
        self._set("debug_copy_delay_ms", delay)
        if self.kv_cache_gib is not None and self.num_gpu_blocks is not None:
            raise ConfigError("give kv_cache_gib or num_gpu_blocks, not both")


NAMES = frozenset(field.name for field in fields(EngineConfig))
OPTIONAL = frozenset(field.name for field in fields(EngineConfig) if field.default is None)


class Settings(TypedDict, total=False):
    """The fields of EngineConfig but `model`, as keywords of LLM, AsyncLLM and LLMEngine.

    dtype and device may also be torch's own; tokenizer and chat_template paths.
    """

    tokenizer: str | os.PathLike[str] | None
    chat_template: str | os.PathLike[str] | None
    dtype: str | Any
    device: str | Any
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_gib: float | None
    num_gpu_blocks: int | None
    kvcache_block_size: int
    enable_prefix_caching: bool
    prefix_cache_file: str | os.PathLike[str] | None
    enforce_eager: bool
    load_format: str
    attention_backend: str
    quantization: str | None
    activation_dtype: str | None
    seed: int
    num_threads: int | None
    tensor_parallel_size: int
    max_num_partial_prefills: int
    max_long_partial_prefills: int
    long_prefill_token_threshold: int | None
    decode_reserve_blocks: int
    enable_cpu_offload: bool | None
    offload_mode: str
    kv_offload_gib: float | None
    kv_offload_dtype: str | None
    ring_slots: int
    slot_tokens: int | None
    stream_mib_per_step: float | None
    measure_speed: bool
    speculative: str | None
    lora: str | os.PathLike[str] | None
    draft_model: str | os.PathLike[str] | None
    generation_config: str | None
    debug_kv: bool
    debug_copy_delay_ms: float


def shows_settings(init: Init) -> Init:
    """Decorate a constructor whose keywords are Settings: help() shows each, with its default."""
    ours = signature(init)
    named = [p for p in ours.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    known = [p for p in signature(EngineConfig).parameters.values() if p.name != "model"]
    settings = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in known]
    shown_as = ours.replace(parameters=[*named, *settings])
    init.__signature__ = shown_as  # type: ignore[attr-defined]  # what inspect looks for
    return init


@cache  # asked in every step
def guessers_of(speculative: str | None) -> Mapping[str, int]:
    """The K of each part of `speculative`; empty if there is none, or it is misspelled."""
    named = {None: DEFAULT_SPECULATIVE, "auto": AUTO_SPECULATIVE}
    spelled = named.get(speculative, speculative or "")
    found = re.fullmatch(
        r"(?:(ngram):(\d{1,3}))?(?:(?:^|(?<=\d)\+)(resident|mtp|draft):(\d{1,3}))?", spelled
    )
    parts = found.groups() if found else ()
    counts = {name: int(k) for name, k in zip(parts[::2], parts[1::2], strict=True) if name}
    return counts if all(1 <= k <= MAX_GUESSES for k in counts.values()) else {}


def in_gib(num_bytes: int, digits: int = 2) -> str:
    """An amount of memory as the plan and errors show it, with so many digits after the point."""
    return f"{num_bytes / GIB:.{digits}f} GiB"


def make_config(model: Any, settings: Mapping[str, Any]) -> EngineConfig:
    """An EngineConfig from keywords. Raises ConfigError for unknown ones, with what they are here
    or a near name; other engines' ones that ask for what is done anyway are left out, and None.
    """
    required = NAMES - OPTIONAL
    given = {n: v for n, v in settings.items() if v is not None or n not in required}
    if "kv_offloading_size" in given:  # vLLM's name
        given.setdefault("kv_offload_gib", given.pop("kv_offloading_size"))
    for name in given.keys() - NAMES:
        if not asks_what_is_done(SETTING, name, given.pop(name)):
            raise ConfigError(unknown_name(SETTING, name, NAMES))
    return EngineConfig(model, **given)


def _bad_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    near = near_name(value.lower(), allowed) if isinstance(value, str) else None
    hint = f"; did you mean {near!r}?" if near else ""
    if name in OPTIONAL and is_one_of(value, ("None",)):  # where settings are texts
        hint = "; leave it out for None"
    either = "None or one of" if name in OPTIONAL else "one of"
    listed = MEANINGS.get(name, f"{either} {', '.join(allowed)}")
    return f"{name} must be {listed}, got {shown(value)}{hint}"
