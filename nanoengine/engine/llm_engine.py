"""LLMEngine: the list of parts, and the loop over them.

    step:  batch  = scheduler.schedule()
           tokens = runner.launch(batch).numbers
           done   = scheduler.postprocess(batch, tokens)

Not thread-safe: one thread at a time may call an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nanoengine.config import EngineConfig, ModelConfig, make_config
from nanoengine.devices.device import Device
from nanoengine.devices.home_process import HomeProcess
from nanoengine.engine.input_processor import InputProcessor
from nanoengine.engine.model_runner import ModelRunner, StepOpener, StepTokens
from nanoengine.engine.output_processor import OutputProcessor
from nanoengine.engine.sampler import Sampler
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.streaming import RequestStream
from nanoengine.errors import EngineClosedError, EngineError
from nanoengine.kernels.cuda_graph import graph_size
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.loading.generation_config import read_sampling_params
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import Sequence
from nanoengine.startup.memory_plan import MemoryPlan, plan_memory
from nanoengine.startup.parts import load_parts, make_engine_device
from nanoengine.startup.probe import DecodeCosts, predict_speed, profiled_bytes
from nanoengine.text.tokenizer import Tokenizer


class LLMEngine:
    """Loads a model and runs requests over it, a step at a time."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """See config.EngineConfig for the settings. Raises ConfigError and ModelLoadError."""
        self._home = HomeProcess()
        self.config: EngineConfig = make_config(model, settings)
        with ExitStack() as started:  # what fails, or is interrupted, leaves no thread behind
            self.device: Device = make_engine_device(self.config)
            started.callback(self.device.close_streams)
            self._start(started)
            self._open_parts = started.pop_all()

    def _start(self, started: ExitStack) -> None:
        """Load the model, divide the memory, make the parts; `started` ends them."""
        config, device = self.config, self.device
        parts = load_parts(config, device)
        self.model_config: ModelConfig = parts.model.config
        self.default_params: SamplingParams = parts.default_params
        self._folder = parts.folder

        def make_runner(kv: StepOpener) -> ModelRunner:
            sampler = Sampler(parts.ops.argmax, device.tensor)
            return ModelRunner(parts.model.decoder, parts.attention, kv, sampler, device)

        dtype = parts.facts.dtype
        profiled = profiled_bytes(make_runner, self.model_config, config, dtype, device)
        self.plan: MemoryPlan = plan_memory(
            config, self.model_config, device, parts.facts, profiled
        )
        uses_graphs = parts.can_use_graphs and not (config.enforce_eager or device.is_checked)
        self.kv = HybridKVCacheManager(
            self.plan.kv,
            device,
            config.enable_prefix_caching,
            config.decode_reserve_blocks,
            config.debug_kv,
            pad_decode=graph_size if uses_graphs else None,
        )
        started.callback(self.kv.close)
        self._runner: ModelRunner | None = make_runner(self.kv)
        self.decode_costs: DecodeCosts | None = None
        if self.plan.kv.num_host_blocks:
            self.plan, self.decode_costs = predict_speed(
                self.plan, config, self._runner, self.kv, device
            )
        self.scheduler = Scheduler(
            config,
            self.kv,
            self.plan.max_num_batched_tokens,
            self.plan.stream_blocks_per_step,
        )
        self._inputs = InputProcessor(
            config, self.model_config, self.plan, parts.tokenizer, self.default_params
        )
        self._outputs = OutputProcessor(parts.tokenizer)
        self._requests: dict[int, list[Sequence]] = {}  # unfinished ones, with their completions
        self._runs_ahead = device.computes_later and not device.is_checked
        self._under_way: StepTokens | None = None

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
        return RequestStream(seqs, self._outputs.completion, self._outputs.logprobs)

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
        return self._finished(ended)

    def abort(self, request_ids: int | Iterable[int]) -> list[RequestOutput]:
        """End requests, free what they hold, and return what they had generated."""
        ids = [request_ids] if isinstance(request_ids, int) else request_ids
        seqs = [seq for request_id in ids for seq in self._requests.get(request_id, ())]
        return self._finished(self._alive().abort(seq.seq_id for seq in seqs))

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

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special ones left out; "" where there is no tokenizer."""
        return self._outputs.decode(token_ids)

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
            self._open_parts.close()

    def _live_runner(self) -> ModelRunner:
        self._home.check("this engine")
        if self._runner is None:
            raise EngineClosedError("the engine was closed; make a new LLM")
        return self._runner

    def _alive(self) -> Scheduler:
        self._live_runner()
        return self.scheduler

    def _finished(self, ended: Iterable[Sequence]) -> list[RequestOutput]:
        """Of the requests whose last completion is among the ended sequences."""
        requests = (seq for seq in ended if not seq.num_candidates)
        owners = dict.fromkeys((seq.source or seq).seq_id for seq in requests)
        done = [i for i in owners if all(seq.is_finished for seq in self._requests[i])]
        return [self._outputs.output(self._requests.pop(i)) for i in done]
