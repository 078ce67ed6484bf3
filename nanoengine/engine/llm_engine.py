"""LLMEngine: the composition root and the step loop. Only this file names memory and maths
together.

    step:  batch  = scheduler.schedule()
           tokens = runner.launch(batch).numbers
           done   = scheduler.postprocess(batch, tokens)

Not thread-safe: one thread at a time may call an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanoengine.attention.select import make_attention
from nanoengine.config import EngineConfig, ModelConfig, make_config
from nanoengine.context import AttentionBackend
from nanoengine.devices.device import Device
from nanoengine.devices.home_process import HomeProcess
from nanoengine.devices.select import make_device
from nanoengine.devices.stream_check import CheckedDevice
from nanoengine.engine.input_processor import InputProcessor
from nanoengine.engine.model_runner import ModelRunner, StepCaches, StepTokens
from nanoengine.engine.sampler import Sampler
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.streaming import RequestStream
from nanoengine.errors import (
    ConfigError,
    EngineClosedError,
    EngineError,
    ModelNotFoundError,
    RequestError,
)
from nanoengine.kernels.c_build import KernelBuildError
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.kernels.cpu_linear import CpuLinear
from nanoengine.kernels.cuda_graph import CudaGraphs, graph_size
from nanoengine.kernels.fused_ops import GpuOps, KernelOps, PackedOps
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.loading.find_model import find_model
from nanoengine.loading.generation_config import read_sampling_params
from nanoengine.loading.loader import LoadedModel, load_model
from nanoengine.models.layer_ops import LayerOps, TorchOps
from nanoengine.models.quant import Quantizer
from nanoengine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence, TokenScore
from nanoengine.startup.memory_plan import (
    MemoryPlan,
    activation_bytes,
    check_step_fits,
    describe_invariance,
    plan_memory,
    streams,
)
from nanoengine.startup.probe import (
    DecodeCosts,
    measure_copy,
    measure_decode,
    profile_step,
    stream_budget,
)
from nanoengine.text.tokenizer import Tokenizer


class LLMEngine:
    """Loads a model and runs requests over it, a step at a time."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """See config.EngineConfig for the settings. Raises ConfigError and ModelLoadError."""
        self._home = HomeProcess()
        self.config: EngineConfig = make_config(model, settings)
        with ExitStack() as started:  # what fails, or is interrupted, leaves no thread behind
            self.device: Device = self._make_device()
            started.callback(self.device.close_streams)
            self._start(started)
            self._parts = started.pop_all()

    def _start(self, started: ExitStack) -> None:
        """Load the model, divide the memory, make the parts; `started` ends them."""
        dtype, why = self._dtype()
        kernels, no_kernels = self._kernels()
        ops = self._layer_ops(kernels, dtype, quantizer := self._quantizer(dtype))
        loaded, self._tokenizer = self._load(ops, dtype)
        self.model_config: ModelConfig = loaded.config
        attention = make_attention(
            self.config.attention_backend,
            kernels,
            no_kernels,
            self.device.torch_device,
            dtype,
            self.config.kvcache_block_size,
            loaded.config.attention,
        )
        self.plan: MemoryPlan = plan_memory(
            self.config,
            loaded.config,
            self.device,
            dtype,
            why,
            loaded.source,
            loaded.weight_bytes - (quantizer.saved_bytes() if quantizer else 0),
            attention.name,
            self._profiled_bytes(loaded, attention, ops, dtype),
            str(quantizer or ""),
            describe_invariance(
                ops.is_batch_invariant,
                attention.is_batch_invariant,
                self.config.kv_offload_dtype == "int8",
            ),
        )
        self.kv = HybridKVCacheManager(
            self.plan.kv,
            self.device,
            self.config.enable_prefix_caching,
            self.config.decode_reserve_blocks,
            self.config.debug_kv,
            pad_decode=graph_size if self._uses_graphs(ops, attention) else None,
        )
        started.callback(self.kv.close)
        self._runner: ModelRunner | None = self._make_runner(loaded, attention, ops, self.kv)
        self.decode_costs: DecodeCosts | None = None
        if self.plan.kv.num_host_blocks:
            self.plan = self._with_predictions()
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            self.plan.max_num_batched_tokens,
            self.plan.stream_blocks_per_step,
        )
        self._inputs = InputProcessor(
            self.config, loaded.config, self.plan, self._tokenizer, self._default_params
        )
        self._requests: dict[int, list[Sequence]] = {}  # unfinished ones, with their completions
        self._runs_ahead = self.device.computes_later and not self.device.is_checked
        self._under_way: StepTokens | None = None

    # -- requests
    # ------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a prompt (text or token ids) and return its request id.

        prompt_text: the text that the ids came from, to be shown on the output. cache_salt: cached
        KV is shared between requests with the same salt only.
        Raises InvalidPromptError, InvalidParamsError or PromptTooLongError; the engine goes on.
        """
        return self._queue(prompt, params, prompt_text, cache_salt)[0].seq_id

    def add_stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """add_request for who wants the text as it comes: take its deltas after steps."""
        seqs = self._queue(prompt, params, prompt_text, cache_salt, is_streamed=True)
        return RequestStream(seqs, self._completion, self._logprobs)

    def _queue(
        self,
        prompt: str | list[int],
        params: SamplingParams | None,
        prompt_text: str | None,
        cache_salt: str | None,
        is_streamed: bool = False,
    ) -> list[Sequence]:
        """Queue a request's completions."""
        self._alive()
        seqs = self._inputs.sequences(prompt, params, prompt_text, cache_salt, is_streamed)
        self._requests[seqs[0].seq_id] = seqs
        for seq in seqs:
            self.scheduler.add(seq)
        return seqs

    def add_beam(
        self,
        prompt: str | list[int],
        num_candidates: int,
        max_tokens: int,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
    ) -> Sequence:
        """Queue a prompt as the first beam of a search, which resumes, forks and ends it by
        scheduler.resume, Sequence.fork and scheduler.abort.

        Raises as add_request.
        """
        params = SamplingParams(0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        (seq,) = self._queue(prompt, params, prompt_text, cache_salt)
        del self._requests[seq.seq_id]  # the search gives the answer
        seq.num_candidates, seq.guesser = num_candidates, None
        return seq

    def fork(self, seq: Sequence, token_id: int) -> Sequence:
        """A beam with another last token, not queued yet."""
        return seq.fork(self._inputs.next_id(), token_id)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that it finished.

        Where the device computes while the host prepares, the step after it is begun before its
        tokens are read.
        """
        scheduler, runner = self._alive(), self._live_runner()
        step = self._under_way
        if step is None:
            batch = scheduler.schedule()
            if not batch.items:
                if scheduler.has_work:
                    raise EngineError(
                        "no request can go on; this is a fault of the engine, not of a request"
                    )
                return []
            step = runner.launch(batch)  # if it raises, nothing was counted: it can run again
            self._under_way = step
        ahead = scheduler.schedule_ahead(step.batch) if self._runs_ahead else None
        self._under_way = runner.launch(ahead, step) if ahead else None
        token_ids = step.numbers.tolist()
        step.give_scores()
        failed = self.kv.take_failures(step.batch)
        ended = scheduler.postprocess(step.batch, token_ids, failed)
        if not scheduler.running:
            self._under_way = None  # nobody wants its tokens
        return self._outputs(ended)

    def abort(self, request_ids: int | Iterable[int]) -> list[RequestOutput]:
        """End requests, free what they hold, and return what they had generated."""
        ids = [request_ids] if isinstance(request_ids, int) else request_ids
        seqs = [seq for request_id in ids for seq in self._requests.get(request_id, ())]
        return self._outputs(self._alive().abort(seq.seq_id for seq in seqs))

    @property
    def has_unfinished_requests(self) -> bool:
        """True while any request is waiting or running."""
        return self._alive().has_work

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidPromptError when it came without one."""
        return self._inputs.tokenizer

    def model_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json says. Raises CorruptModelError."""
        return read_sampling_params(self._folder)

    def check_open(self) -> None:
        """Raises EngineClosedError after close(), ForkedProcessError in a fork of the process."""
        self._live_runner()

    def close(self) -> None:
        """Free weights and KV. A closed engine refuses everything; closing twice is fine. In a fork
        of the process this does nothing: threads and memory are the first process's.
        """
        if self._runner is not None and self._home.is_here:
            self.scheduler.abort(
                [s.seq_id for s in [*self.scheduler.running, *self.scheduler.waiting]]
            )
            self._runner = self._under_way = None
            self._parts.close()

    # -- parts
    # ---------------------------------------------------------------------------------------

    def _with_predictions(self) -> MemoryPlan:
        """The plan with what start-up measured."""
        assert self._runner is not None
        spec = self.plan.kv
        num_blocks = min(spec.most_held, -(-self.plan.max_model_len // spec.block_size))
        costs = measure_decode(self._runner, self.kv, self.device, num_blocks)
        self.decode_costs = costs
        copy_gb_per_s = measure_copy(self.device, self.kv)
        self.kv.end_probe()
        return replace(
            self.plan,
            copy_gb_per_s=copy_gb_per_s,
            stream_blocks_per_step=stream_budget(self.config, spec, costs),
            decode_tokens_per_s=costs.tokens_per_s(num_blocks, spec.num_blocks),
        )

    def _make_runner(
        self, loaded: LoadedModel, attention: AttentionBackend, ops: LayerOps, kv: StepCaches
    ) -> ModelRunner:
        sampler = Sampler(ops.argmax, self.device.tensor)
        return ModelRunner(loaded.decoder, attention, kv, sampler, self.device)

    def _load(self, ops: LayerOps, dtype: torch.dtype) -> tuple[LoadedModel, Tokenizer | None]:
        config = self.config
        self._folder, self._default_params = self._find_model()
        with ThreadPoolExecutor(1) as thread:  # the vocabulary is parsed while weights are packed
            tokenizer = thread.submit(self._load_tokenizer, self._folder)
            loaded = load_model(
                self._folder,
                config.load_format,
                self.device.torch_device,
                dtype,
                config.seed,
                ops,
                config.max_model_len,
            )
        return loaded, tokenizer.result()

    def _profiled_bytes(
        self, loaded: LoadedModel, attention: AttentionBackend, ops: LayerOps, dtype: torch.dtype
    ) -> int | None:
        """What the largest step holds beside weights and KV, where the rest is for KV."""
        config = self.config
        if config.num_gpu_blocks or config.kv_cache_gib or not self.device.computes_later:
            return None
        tokens, seqs = config.max_num_batched_tokens, config.max_num_seqs
        estimated = activation_bytes(loaded.config, tokens, seqs, dtype.itemsize)
        check_step_fits(config, estimated, self.device.memory()[0])  # before it is tried
        return profile_step(
            lambda kv: self._make_runner(loaded, attention, ops, kv),
            loaded.config,
            config,
            dtype,
            self.device,
        )

    def _live_runner(self) -> ModelRunner:
        self._home.check("this engine")
        if self._runner is None:
            raise EngineClosedError("the engine was closed; make a new LLM")
        return self._runner

    def _alive(self) -> Scheduler:
        self._live_runner()
        return self.scheduler

    def _dtype(self) -> tuple[torch.dtype, str]:
        if self.config.dtype == "auto":
            return self.device.auto_dtype()
        dtype: torch.dtype = getattr(torch, self.config.dtype)
        if self.device.name == "cpu" and dtype is torch.float16:
            raise ConfigError("float16 arithmetic is not offered on a CPU; use bfloat16 or float32")
        return dtype, "as asked"

    def _kernels(self) -> tuple[CpuKernels | None, str]:
        """The C kernels where they serve, else None and why."""
        if self.device.name != "cpu":
            return None, ""
        try:
            return CpuKernels.load(), ""
        except KernelBuildError as error:
            return None, str(error)

    def _quantizer(self, dtype: torch.dtype) -> Quantizer | None:
        method = self.config.quantization
        return None if method is None else Quantizer(method, self.device.torch_device, dtype)

    def _layer_ops(
        self, kernels: CpuKernels | None, dtype: torch.dtype, quantizer: Quantizer | None
    ) -> LayerOps:
        if self.device.name != "cpu":
            return self._gpu_ops(quantizer)
        if kernels is None:
            return TorchOps(quantizer)
        if dtype is not torch.bfloat16:
            return KernelOps(kernels, kernels.tape, quantizer)
        try:
            return PackedOps(kernels, CpuLinear.load(kernels.tape), quantizer)
        except KernelBuildError:
            return KernelOps(kernels, kernels.tape, quantizer)

    def _gpu_ops(self, quantizer: Quantizer | None) -> LayerOps:
        try:
            from nanoengine.kernels.triton_kernels import (
                TritonKernels,  # what PyTorch for a GPU brings
            )
        except ImportError:
            return TorchOps(quantizer)
        graphs = None if self.config.enforce_eager else CudaGraphs()
        return GpuOps(TritonKernels(), graphs, quantizer)

    def _uses_graphs(self, ops: LayerOps, attention: AttentionBackend) -> bool:
        """Whether decode steps are replayed as CUDA graphs."""
        is_on = isinstance(ops, GpuOps) and not self.config.enforce_eager
        return is_on and attention.follows_tensors and not self.device.is_checked

    def _make_device(self) -> Device:
        config = self.config
        delay_s = config.debug_copy_delay_ms / 1000
        has_workers = streams(config, "cpu")
        device = make_device(config.device, config.num_threads, has_workers, delay_s)
        return CheckedDevice(device) if config.debug_kv else device

    def _find_model(self) -> tuple[Path, SamplingParams]:
        """The model's folder, and the parameters of requests that bring none."""
        folder = find_model(self.config.model, self.config.load_format)
        is_asked = self.config.generation_config == "auto"
        return folder, read_sampling_params(folder) if is_asked else SamplingParams()

    def _load_tokenizer(self, model_folder: Path) -> Tokenizer | None:
        if self.config.tokenizer:
            return Tokenizer.from_folder(Path(self.config.tokenizer).expanduser())
        try:
            return Tokenizer.from_folder(model_folder)
        except ModelNotFoundError:
            return None  # token ids will do

    def _outputs(self, ended: Iterable[Sequence]) -> list[RequestOutput]:
        """Of the requests whose last completion is among the ended sequences."""
        requests = (seq for seq in ended if not seq.num_candidates)
        owners = dict.fromkeys((seq.source or seq).seq_id for seq in requests)
        done = [i for i in owners if all(seq.is_finished for seq in self._requests[i])]
        return [self._output(self._requests.pop(i)) for i in done]

    def _completion(self, seq: Sequence) -> CompletionOutput:
        token_ids = seq.output_token_ids
        scores = seq.scores[: len(token_ids)]
        is_scored = seq.params.logprobs is not None
        return CompletionOutput(
            seq.index,
            self._text(seq),
            token_ids,
            seq.finish_reason,
            seq.stop_reason,
            [self._logprobs(score) for score in scores] if is_scored else None,
            sum(score.logprob for score in scores) if is_scored else None,
        )

    def _output(self, seqs: list[Sequence]) -> RequestOutput:
        seq = seqs[0]
        failures = (each.error for each in seqs)
        is_prompt_scored = seq.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=seq.seq_id,
            prompt=seq.prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            outputs=[self._completion(each) for each in seqs],
            metrics=seq.metrics,
            num_cached_tokens=seq.num_cached,
            num_host_cached_tokens=seq.num_cached_on_host,
            error=next(filter(None, failures), None),
            prompt_logprobs=(
                [None, *map(self._logprobs, seq.prompt_scores)] if is_prompt_scored else None
            ),
        )

    def _text(self, seq: Sequence) -> str:
        if seq.text is not None:
            return seq.text
        if self._tokenizer is None or not seq.params.detokenize:
            return ""
        token_ids = seq.output_token_ids
        if seq.finish_reason == "stop" and not seq.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]  # the token that ended the text is not part of it
        try:
            return self._tokenizer.decode(token_ids, seq.params.skip_special_tokens)
        except RequestError as error:
            seq.error, seq.finish_reason = error, "error"
            return ""

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special ones left out; "" where there is no tokenizer."""
        return self._tokenizer.decode(token_ids) if self._tokenizer else ""

    def _logprobs(self, score: TokenScore) -> TokenLogprobs:
        """The likeliest tokens of a position and the one that stands there."""
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(score.likeliest, 1)]
        if all(i != score.token_id for i, _, _ in ranked):
            ranked.append((score.token_id, score.logprob, score.rank))
        return {i: Logprob(value, rank, self._decoded(i)) for i, value, rank in ranked}

    def _decoded(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def refused(text: str | None, prompt: object, error: RequestError) -> RequestOutput:
    """The output of a request that never entered the engine."""
    ids = [t for t in prompt if type(t) is int] if isinstance(prompt, list | tuple) else []
    text = prompt if isinstance(prompt, str) else text
    return RequestOutput(-1, text, ids, [CompletionOutput(0, "", [], "error")], error=error)
