"""LLMEngine: the list of parts, and the loop over them.

    step:  batch  = scheduler.schedule()
           batch, tokens, _ = runner.launch(batch).read()
           done   = scheduler.postprocess(batch, tokens)

Not thread-safe: one thread at a time may call an engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Unpack

from nanoengine.config.engine import EngineConfig, Settings, make_config, shows_settings
from nanoengine.config.model import ModelConfig
from nanoengine.devices.device import Device
from nanoengine.devices.home_process import HomeProcess
from nanoengine.engine.input_processor import InputProcessor
from nanoengine.engine.model_runner import ModelRunner, make_runner
from nanoengine.engine.output_processor import OutputProcessor, RequestState
from nanoengine.engine.ranks import Ranks, start_ranks
from nanoengine.engine.scheduler import Scheduler
from nanoengine.engine.step_tokens import StepTokens
from nanoengine.errors import EngineClosedError, EngineError
from nanoengine.kv.kv_cache import HybridKVCacheManager
from nanoengine.loading.model_cache import in_use
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import ScheduledBatch
from nanoengine.startup.largest_step import profiled_bytes
from nanoengine.startup.memory_plan import plan_memory
from nanoengine.startup.parts import make_engine_device, step_padding
from nanoengine.startup.plan import MemoryPlan
from nanoengine.startup.probe import DecodeCosts, predict_speed
from nanoengine.startup.saved_prefixes import SavedPrefixes


class LLMEngine:
    """Loads a model and runs requests over it, a step at a time.

    inputs makes the sequences of requests, outputs their results. runs_ahead: a step begins before
    the tokens of the previous one are read, as a GPU can. batch: the last step's.
    """

    @shows_settings
    def __init__(self, model: str | Path, **settings: Unpack[Settings]) -> None:
        """settings: those of config.engine.EngineConfig. Raises ConfigError and ModelLoadError."""
        self._home = HomeProcess()
        self.config: EngineConfig = make_config(model, settings)
        with ExitStack() as started:  # if start-up fails or is interrupted, no thread is left
            ranks = start_ranks(self.config)
            started.callback(ranks.close)
            self.abort_ranks = ranks.abort
            self.device: Device = make_engine_device(ranks.config)
            started.callback(self.device.close_streams)
            self._make_parts(ranks, started)
            self._open_parts = started.pop_all()
        self.runs_ahead = self.device.computes_later and not self.device.is_checked
        self._under_way: StepTokens | None = None
        self.batch = ScheduledBatch(())

    def _make_parts(self, ranks: Ranks, started: ExitStack) -> None:
        """Load the model, divide the memory, make the parts; `started` closes them."""
        parts = ranks.load(self.device)
        config, device = ranks.config, self.device
        started.enter_context(in_use(parts.folder))
        self.model_config: ModelConfig = parts.model.config
        part, dtype = parts.model.part, parts.facts.dtype
        profiled = profiled_bytes(
            lambda kv: make_runner(parts, kv, device), part, config, dtype, device
        )
        self.plan: MemoryPlan = plan_memory(
            config, part, ranks.share_of(device), parts.facts, profiled
        )
        self.kv = HybridKVCacheManager(
            self.plan.kv,
            device,
            config.enable_prefix_caching,
            config.decode_reserve_blocks,
            config.debug_kv,
            step_padding(config, parts, device),
            make_memory=ranks.make_memory,
        )
        started.callback(self.kv.close)
        self._runner: ModelRunner | None = make_runner(parts, self.kv, device)
        self.decode_costs: DecodeCosts | None = None
        if self.plan.kv.num_host_blocks:
            self.plan, self.decode_costs = predict_speed(
                self.plan, config, self._runner, self.kv, device, ranks.link_speeds
            )
        started.callback(SavedPrefixes(config, parts, self.kv).write)
        limits = self.plan.max_num_batched_tokens, self.plan.stream_blocks_per_step
        takes_turns = device.computes_later and config.tensor_parallel_size == 1
        self.scheduler = Scheduler(config, self.kv, *limits, takes_turns=takes_turns)
        self.inputs = InputProcessor(config, self.plan, parts)
        self.outputs = OutputProcessor(parts.tokenizer)

    @property
    def runner(self) -> ModelRunner:
        """Runs the steps. Raises EngineClosedError after close(), ForkedProcessError in a fork."""
        self._home.check("this engine")
        if self._runner is None:
            raise EngineClosedError("the engine was closed; make a new LLM")
        return self._runner

    def check_open(self) -> None:
        """Raises EngineClosedError after close(), ForkedProcessError in a fork of the process."""
        _ = self.runner

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a prompt (text or token ids) and return its request id.

        prompt_text: the text that the ids came from, shown on the output. cache_salt: cached KV is
        shared only between requests with the same salt.
        Raises InvalidPromptError, InvalidParamsError or PromptTooLongError; the engine goes on.
        """
        return self.add_stream(prompt, params, prompt_text, cache_salt, False).request_id

    def add_stream(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        is_streamed: bool = True,
    ) -> RequestState:
        """Like add_request, but returns its state: take its deltas after steps, if is_streamed."""
        self.check_open()
        seqs = self.inputs.sequences(prompt, params, prompt_text, cache_salt, is_streamed)
        for seq in seqs:
            self.scheduler.add(seq)
        return self.outputs.expect(seqs)

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the requests that it finished.

        If runs_ahead, the next step begins before the tokens of this one are read.
        """
        scheduler, runner, at_once = self.scheduler, self.runner, self.kv.blocks.at_once
        step, self._under_way = self._under_way, None
        if step is None:
            with at_once():
                batch = scheduler.schedule()
                if not (batch.items or scheduler.has_work):
                    return []
                if not batch.items:
                    raise EngineError("no request can go on; this is a fault of the engine")
            step = runner.launch(batch)  # if it raises, nothing was counted: it can run again
        with at_once():
            ahead = scheduler.schedule_ahead(step.batch) if self.runs_ahead else None
        under_way = runner.launch(ahead, step) if ahead else None
        self.batch, token_ids, next_guesses = step.read()
        with at_once():
            step.scores.append_to_sequences(self.batch, token_ids)
            failed = self.kv.take_failures(self.batch)
            ended = scheduler.postprocess(self.batch, token_ids, failed, next_guesses)
            self._under_way = under_way if scheduler.running else None  # nobody wants its tokens
            return self.outputs.finish(ended, self.batch.num_tokens)

    def abort(self, request_ids: int | Iterable[int]) -> list[RequestOutput]:
        """End requests, free what they hold, and return what they had generated."""
        self.check_open()
        ids = [request_ids] if isinstance(request_ids, int) else request_ids
        with self.kv.blocks.at_once():
            return self.outputs.finish(self.scheduler.abort(self.outputs.unfinished(ids)))

    @property
    def has_unfinished_requests(self) -> bool:
        """True while any request is waiting or running."""
        self.check_open()
        return self.scheduler.has_work

    def close(self) -> None:
        """Free weights and KV. A closed engine refuses everything; closing twice is fine. In a fork
        of the process this does nothing: threads and memory are the first process's.
        """
        if self._runner is not None and self._home.is_here:
            if self.kv.blocks.is_whole:
                self.scheduler.abort([*self.scheduler.running, *self.scheduler.waiting])
            self._runner = self._under_way = None
            self._open_parts.close()
