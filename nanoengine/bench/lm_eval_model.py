"""The engine as a model of lm-eval. Only lm_eval.py, and programs that have lm-eval, import this
file: it is no dependency.

lm-eval (EleutherAI's lm-evaluation-harness) makes the prompts and scores the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from nanoengine.api.llm import LLM
from nanoengine.errors import ConfigError, InvalidParamsError
from nanoengine.outputs import RequestOutput
from nanoengine.sampling_params import SamplingParams

# Prompts in one call of the engine: enough to fill its batches, few enough that the
# log-probabilities of all their tokens are small.
GROUP = 256

# A context and its continuation as texts, which is None for a window of a longer text; then both
# as token ids.
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("nanoengine")
class NanoengineLM(TemplateLM):  # type: ignore[misc]  # lm-eval is not installed where mypy runs
    """lm-eval's model type `nanoengine`.

    Prompts that are too long lose their beginning, as in lm-eval's other types.
    """

    def __init__(
        self,
        pretrained: str,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        """pretrained: what LLM takes for a model. max_gen_toks: most tokens of an answer whose task
        sets none. add_bos_token: None: as the tokenizer does. device: lm-eval says "cuda:0" unless
        it is told something else, so without a GPU that means the CPU. batch_size, max_batch_size:
        ignored, the engine fills its batches itself. settings: the others of LLM.

        Raises ConfigError for an unknown or unusable setting, ModelLoadError for a bad model.
        """
        super().__init__()
        if device is not None and (device[:4] != "cuda" or torch.cuda.is_available()):
            settings["device"] = device
        self.llm = LLM(pretrained, **settings)
        self.tokenizer = self.llm.tokenizer
        self._pretrained, self._add_bos = pretrained, add_bos_token
        self.max_gen_toks = max_gen_toks

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return int(self.llm.plan.max_model_len)

    @property
    def tokenizer_name(self) -> str:
        """Names the model in the keys of lm-eval's caches."""
        return self._pretrained.replace("/", "__")

    @property
    def eot_token_id(self) -> int | None:
        """Id of the tokenizer's end-of-text token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that stands before a text without a context. Raises ConfigError if the
        tokenizer has neither a beginning-of-text nor an end-of-text token.
        """
        bos = self.tokenizer.bos_token_id
        found = self.eot_token_id if bos is None else bos
        if found is None:
            raise ConfigError(
                f"{self._pretrained}: the tokenizer has neither a beginning-of-text nor an "
                "end-of-text token, so a text without a context has no likelihood"
            )
        return found

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of a text. add_special_tokens: None adds the beginning-of-text token, if there is
        one, unless the text begins with it.
        """
        if add_special_tokens is None:
            bos = self.tokenizer.special_tokens.get("bos_token")
            has_bos = bos is not None and string.startswith(bos)
            add_special_tokens = not has_bos and self._add_bos is not False
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text. Without add_generation_prompt the last message is the beginning
        of the answer.
        """
        goes_on = not add_generation_prompt
        return self.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt, continue_final_message=goes_on
        )

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation; True if each of its tokens is the likeliest."""
        longest = self.max_length - 1  # the engine generates a token
        prompts = [(context + continuation)[-longest:] for _, context, continuation in requests]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._outputs(prompts, [params] * len(prompts), disable_tqdm)
        answers = []
        for (texts, _context, continuation), output in zip(requests, outputs, strict=True):
            answer = _continuation(output, len(continuation))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
            answers.append(answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that do not overlap if it is too long."""
        windows: list[Scored] = []
        counts = []
        for text in (request.args[0] for request in requests):
            made = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,  # beside the prefix and a generated token
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in made]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each prompt, up to the first of its stops."""
        made = [self._generation(*request.args) for request in requests]
        prompts, params = [ids for ids, _ in made], [param for _, param in made]
        answers = []
        outputs = self._outputs(prompts, params, disable_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            answer = output.outputs[0].text
            self.cache_hook.add_partial("generate_until", request.args, answer)
            answers.append(answer)
        return answers

    def _generation(self, context: str, given: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        """A prompt's ids, and how it is answered."""
        wanted = dict(normalize_gen_kwargs(given, self.max_gen_toks))
        is_sampled = wanted.pop("do_sample")
        if is_sampled and not wanted.get("temperature"):
            raise InvalidParamsError(
                f"do_sample=True with temperature={wanted.get('temperature')}: set a temperature "
                "above 0, as in --gen_kwargs temperature=0.7"
            )
        wanted.setdefault("temperature", 0.0)
        eos = self.tokenizer.special_tokens.get("eos_token")
        until = [text for text in handle_stop_sequences(wanted.pop("until"), eos) if text]
        ids, num_tokens = maybe_truncate(
            self.tok_encode(context), wanted.pop("max_gen_toks"), self.max_length
        )
        # Stops may be the texts of special tokens.
        params = SamplingParams(
            max_tokens=num_tokens, stop=until, skip_special_tokens=False, **wanted
        )
        return ids, params

    def _outputs(
        self, prompts: list[list[int]], params: list[SamplingParams], disable_tqdm: bool
    ) -> Iterator[RequestOutput]:
        """The engine's outputs, in order. Raises the RequestError of a prompt that it refuses."""
        with tqdm(total=len(prompts), desc="prompts", disable=disable_tqdm) as bar:
            for start in range(0, len(prompts), GROUP):
                group = slice(start, start + GROUP)
                for output in self.llm.generate(prompts[group], params[group], use_tqdm=False):
                    if output.error is not None:
                        raise output.error
                    bar.update()
                    yield output


def _continuation(output: RequestOutput, num_tokens: int) -> tuple[float, bool]:
    """The sum of the log-probabilities of a prompt's last tokens, and whether each of them is the
    likeliest. A prompt's first token has none.
    """
    positions = output.prompt_logprobs or []
    first = len(positions) - num_tokens
    ids = output.prompt_token_ids
    own = [at[ids[i]] for i, at in enumerate(positions) if i >= first and at is not None]
    return sum(entry.logprob for entry in own), all(entry.rank == 1 for entry in own)
