"""LLM: the synchronous API. Takes batches of prompts and returns texts, with a progress bar.

with LLM("smollm2-135m") as llm:
    outputs = llm.generate("The capital of France is", SamplingParams(temperature=0))
    print(outputs[0].outputs[0].text)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack, cast

from nanoengine.api.beam_search import BeamSearch, BeamSearches, beam_params
from nanoengine.api.block_map import BlockMap
from nanoengine.api.chat_rules import ChatRules, MessageReader
from nanoengine.api.progress import RequestProgress, progress_bar
from nanoengine.api.read_stats import block_map, engine_stats
from nanoengine.api.request_forms import (
    GivenPrompt,
    Messages,
    OneParams,
    Params,
    Prompt,
    chat_prompt,
    given_prompt,
    is_conversation,
    is_single,
    one_params,
    params_for,
)
from nanoengine.api.stats import EngineStats
from nanoengine.api.streaming import DeltaStream
from nanoengine.api.turns import Turn, Turns
from nanoengine.config.engine import NAMES, Settings, shows_settings
from nanoengine.engine.llm_engine import LLMEngine
from nanoengine.engine.output_processor import RequestState
from nanoengine.errors import InvalidPromptError, RequestError, counted, ends_at_the_user, warn_user
from nanoengine.outputs import BeamSearchOutput, RequestOutput, StreamDelta
from nanoengine.sampling_params import BeamSearchParams, SamplingParams
from nanoengine.text.answer_parser import ChatParsers
from nanoengine.text.known_methods import explains_methods
from nanoengine.text.known_names import ARGUMENT, explains_unknown, translated
from nanoengine.text.rendering import Rendering, TemplateKwargs, Tools
from nanoengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@explains_methods()
class LLM:
    """A loaded model. `with LLM(...) as llm` or `close()` frees it; a process may have several.

    Only one thread at a time may use an instance: a call during another thread's `generate`, `chat`
    or next delta of a stream raises EngineError. Use AsyncLLM for many threads.
    """

    @ends_at_the_user
    @shows_settings
    def __init__(self, model: str | Path, **settings: Unpack[Settings]) -> None:
        """model, settings: help(nanoengine.config.engine.EngineConfig) explains each of them.

        Raises ConfigError for an unknown or unusable setting, ModelLoadError for a bad model.
        """
        engine = LLMEngine(model, **settings)
        logger.info("%s", engine.plan)
        self.llm_engine = engine
        calls = engine.check_open, engine.abort, engine.close, lambda: engine.kv.blocks.is_whole
        self._turns = Turns(*calls, engine.abort_ranks)
        # Runs also when this object is collected and when Python exits: a thread that ends inside
        # PyTorch aborts the process.
        weakref.finalize(self, self._turns.close)

    @classmethod
    @ends_at_the_user
    def from_engine_args(cls, engine_args: object) -> Self:
        """An LLM from other engines' arguments: a mapping, or an object such as vLLM's EngineArgs.

        Names that mean the same are translated; values that are an object's defaults, or that ask
        for nothing, are left out. Raises ConfigError that says for each other name what it is here.
        """
        return cls(**translated(engine_args, NAMES))

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raises InvalidPromptError: unlike transformers' pipeline, an LLM is not called."""
        raise InvalidPromptError(
            "an LLM is not called itself; write llm.generate(prompt, SamplingParams(max_tokens=64))"
            " or llm.chat(messages)"
        )

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: pickled, an LLM would be all of its memory once more."""
        raise TypeError("an LLM cannot be pickled or copied; make it in the process that uses it")

    @property
    def plan(self) -> Any:
        """What start-up decided and allocated; print it to read it."""
        return self.llm_engine.plan

    def __repr__(self) -> str:
        plan = self.plan
        return f"<LLM {plan.model!r} on {plan.device}, up to {plan.max_model_len} tokens>"

    def stats(self) -> EngineStats:
        """Where KV lies now, how many requests run and wait, what was copied and found in the
        prefix cache since start-up; print it to read it.
        """
        with Turn(self._turns):
            return engine_stats(self.llm_engine)

    def block_map(self) -> BlockMap:
        """Where the KV blocks of each unfinished request lie now."""
        with Turn(self._turns):
            return block_map(self.llm_engine)

    @ends_at_the_user
    @explains_unknown(ARGUMENT, " of generate()")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list of them, in order.

        prompts: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these. A
        dict may have a "cache_salt": only prompts with equal salts share cached KV. Text is encoded
        as in transformers and vLLM: a tokenizer that adds a beginning-of-sequence token adds one
        even if the text has its own; to prevent that, give token ids.
        sampling_params: a SamplingParams, or a dict of its fields, for all prompts, or one each.
        use_tqdm: whether to show a progress bar, or what makes one, such as a subclass of tqdm.
        Raises RequestError for a single bad prompt; in a list, that output's `error` is set, its
        finish_reason is "error", the others are answered, and a UserWarning names the first error.
        Ctrl-C aborts all requests and raises KeyboardInterrupt as usual.
        """
        single = is_single(prompts)
        requests = [given_prompt(p) for p in ([prompts] if single else prompts)]
        return self._answer(requests, sampling_params, single, use_tqdm)

    @ends_at_the_user
    @explains_unknown(ARGUMENT, " of chat()")
    def chat(
        self,
        messages: Messages | list[Messages],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: TemplateKwargs = None,
        tools: Tools = None,
        tool_choice: Any = None,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them: lists of {"role": ..., "content": ...}.

        A content is text, or OpenAI's list of parts {"type": "text", "text": ...}; the texts are
        joined by newlines. Each output has a `message`: its text's content, reasoning and tool
        calls; `messages.append(out.outputs[0].message.as_dict())` goes on with it.
        tools: descriptions in OpenAI's form, which the template shows to the model. tool_choice:
        "auto", "none", "required" or {"type": "function", "function": {"name": ...}}; the last two
        hold the answer by a grammar, so its calls fit the tools' schemas. Without it, calls stay in
        the text if it is not known how the model writes them.
        chat_template_kwargs: variables of the model's chat template, the same for all
        conversations, such as Qwen3's {"enable_thinking": False} or "documents". No special tokens
        are added to those that the template writes.
        continue_final_message: with add_generation_prompt=False, the answer goes on with the text
        of the last message; it does not repeat it.
        Raises InvalidPromptError if the model has no chat template or the template refuses the
        messages, InvalidParamsError for an argument that is no template variable, and for tools
        that cannot be called.
        """
        if not isinstance(messages, list | tuple):
            raise InvalidPromptError(
                'messages must be a list of {"role": ..., "content": ...}, or a list of such '
                f"lists, got {type(messages).__name__}"
            )
        many = bool(messages) and isinstance(messages[0], list | tuple)
        conversations: list[Any] = list(messages) if many else [messages]
        written = add_generation_prompt, chat_template_kwargs, tools, continue_final_message
        rules = self.chat_rules(Rendering(*written), tool_choice)
        requests = [self._chat_request(c, rules) for c in conversations]
        params = [
            rules.params(given or self.llm_engine.inputs.default_params)
            for given in params_for(sampling_params, len(requests))
        ]
        outputs = self._answer(requests, params, not many, use_tqdm)
        return [rules.with_messages(output) for output in outputs]

    def chat_rules(self, rendering: Rendering, tool_choice: Any = None) -> ChatRules:
        """How the answers of chats that are rendered so are held and read; see chat()."""
        return ChatRules.of(self._parsers, rendering, tool_choice)

    @ends_at_the_user
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **settings: Any,
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of one prompt or a list of them by beam search:
        `llm.beam_search(prompts, beam_width=4, max_tokens=64)`.

        prompts: as for generate(). params: a BeamSearchParams, or its fields as keywords.
        Results and order equal those of transformers' `generate(num_beams=W,
        num_return_sequences=W, do_sample=False)`. Errors and Ctrl-C are as in generate(), except
        that a refused prompt in a list has no sequences.
        """
        params = beam_params(params, settings)
        single = is_single(prompts)
        requests = [given_prompt(p) for p in ([prompts] if single else prompts)]
        searches: list[BeamSearch | BeamSearchOutput] = []
        with (
            Turn(self._turns) as turn,
            BeamSearches(self.llm_engine, params) as running,
            progress_bar("searches", len(requests), use_tqdm) as bar,
        ):
            for request in requests:
                try:
                    searches.append(running.add(*request.checked()))
                except RequestError as error:
                    if single:
                        raise
                    output = request.refused(error)
                    ids = output.prompt_token_ids
                    searches.append(BeamSearchOutput(output.prompt, ids, [], error))
                    bar.update()
            while not running.is_finished:
                bar.update(turn.run(running.step))
        outputs = [s.output if isinstance(s, BeamSearch) else s for s in searches]
        _warn_of_failures(outputs)
        return outputs

    @ends_at_the_user
    @explains_unknown(ARGUMENT, " of stream()")
    def stream(self, prompt: Prompt | Messages, sampling_params: OneParams = None) -> DeltaStream:
        """Stream the completion of one prompt: `for delta in llm.stream("The sea is"): ...`

        A delta is a string with more fields; `"".join(llm.stream(prompt))` is generate()'s text.
        A list of messages is a conversation, as for stream_chat(): it can be nothing else.
        Open streams, and generate() between two deltas, share the engine's steps. Leaving a stream
        early aborts its request.
        Raises at once what generate() raises for the prompt.
        """
        if is_conversation(prompt):
            return self.stream_chat(cast(Messages, prompt), sampling_params)
        if not isinstance(prompt, dict) and not is_single(prompt):
            raise InvalidPromptError(
                f"a stream takes one prompt, got a list of {len(prompt)}; open a stream for each"
            )
        return self._stream(given_prompt(prompt), sampling_params)

    @ends_at_the_user
    @explains_unknown(ARGUMENT, " of stream_chat()")
    def stream_chat(
        self,
        messages: Messages,
        sampling_params: OneParams = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: TemplateKwargs = None,
        tools: Tools = None,
        tool_choice: Any = None,
        continue_final_message: bool = False,
    ) -> DeltaStream:
        """Stream the answer to one conversation; see stream() and chat(). Each delta has a
        `message`: what is new of the answer's content, reasoning and tool calls.
        """
        written = add_generation_prompt, chat_template_kwargs, tools, continue_final_message
        rules = self.chat_rules(Rendering(*written), tool_choice)
        held = rules.params(one_params(sampling_params) or self.llm_engine.inputs.default_params)
        return self.stream_held(self._chat_request(messages, rules), held, rules)

    def stream_held(
        self, request: GivenPrompt, params: SamplingParams, rules: ChatRules
    ) -> DeltaStream:
        """As stream_chat(), of what chat_prompt() and `rules` have made."""
        return self._stream(request, params, rules.reader(request.text or ""))

    def close_streams(self, streams: Iterable[DeltaStream]) -> None:
        """End several streams: the engine looks for their requests once."""
        with Turn(self._turns):
            for stream in streams:
                stream.close()

    def step(self) -> None:
        """Let all open streams go on by one step of the engine, without waiting for one of them."""
        with Turn(self._turns) as turn:
            turn.run(self.llm_engine.step)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm_engine.inputs.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer (vLLM's name)."""
        return self.tokenizer

    @ends_at_the_user
    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams with the values of the model's generation_config.json (temperature, top_k,
        top_p, min_p, repetition_penalty); change others with `dataclasses.replace`. With the
        setting generation_config="auto", requests without parameters use them.

        Raises CorruptModelError for values out of range.
        """
        return self.llm_engine.inputs.model_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; requests that run keep theirs. True, as in vLLM: it never fails."""
        with Turn(self._turns):
            self.llm_engine.kv.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Free weights and KV; closing twice is fine. A call under way in another thread ends after
        its step with EngineClosedError, and so does one whose step waits for a rank that has
        stopped. In a forked process this does nothing.
        """
        self._turns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chat_request(self, messages: Any, rules: ChatRules) -> GivenPrompt:
        max_model_len = self.plan.max_model_len
        return chat_prompt(self.tokenizer, max_model_len, messages, rules.rendering)

    @cached_property
    def _parsers(self) -> ChatParsers:
        return ChatParsers.of(self.tokenizer)

    def _answer(
        self,
        requests: list[GivenPrompt],
        params: Params,
        single: bool,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        positions: dict[int | str, int] = {}
        with Turn(self._turns) as turn:
            try:
                for index, (request, param) in enumerate(
                    zip(requests, params_for(params, len(requests)), strict=True)
                ):
                    try:
                        positions[self._add(request, param)] = index
                    except RequestError as error:
                        if single:
                            raise
                        outputs[index] = request.refused(error)
                for output in self._run(set(positions), use_tqdm, turn):
                    outputs[positions[output.request_id]] = output
            except BaseException:
                self._turns.abort([*map(int, positions)])
                raise
        answers = [outputs[index] for index in range(len(requests))]
        _warn_of_failures(answers)
        return answers

    def _add(self, request: GivenPrompt, params: SamplingParams | None) -> int:
        prompt, text, salt = request.checked()
        return self.llm_engine.add_request(prompt, params, text, salt)

    def _stream(
        self, request: GivenPrompt, params: OneParams, reader: MessageReader | None = None
    ) -> DeltaStream:
        prompt, text, salt = request.checked()
        with Turn(self._turns):
            stream = self.llm_engine.add_stream(prompt, one_params(params), text, salt)
        return DeltaStream(stream, self._advance, self._turns.abandon, reader)

    def _advance(self, stream: RequestState) -> list[StreamDelta]:
        """Step until the stream has new deltas."""
        with Turn(self._turns) as turn:
            while not (deltas := stream.new_deltas()):
                turn.run(self.llm_engine.step)
            return deltas

    def _run(
        self, unfinished: set[int | str], use_tqdm: bool | Callable[..., Any], turn: Turn
    ) -> Iterator[RequestOutput]:
        """Step until every request in `unfinished` has finished; yields their outputs."""
        with progress_bar("requests", len(unfinished), use_tqdm) as bar:
            progress = RequestProgress(bar)
            while unfinished:
                for output in turn.run(self.llm_engine.step):
                    if output.request_id not in unfinished:
                        continue
                    unfinished.remove(output.request_id)
                    progress.add(output)
                    yield output
                progress.read(lambda: self.llm_engine.outputs.unfinished(map(int, unfinished)))


def _warn_of_failures(outputs: Sequence[RequestOutput | BeamSearchOutput]) -> None:
    """Warn once about outputs with an error, at which a caller may not look."""
    failed = [index for index, output in enumerate(outputs) if output.error is not None]
    if failed:
        first = f"outputs[{failed[0]}].error: {outputs[failed[0]].error}"
        warn_user(f"{len(failed)} of {counted(len(outputs), 'request')} failed; {first}")
