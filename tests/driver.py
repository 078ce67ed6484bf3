"""Drives an LLMEngine step by step for tests: checks the block accounting, records the logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nanoengine import SamplingParams
from nanoengine.llm_engine import LLMEngine
from nanoengine.outputs import RequestOutput
from nanoengine.sequence import Sequence as EngineSequence

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Driver:
    """Runs requests to their end; `logits[request_id]` are the rows their tokens were chosen
    from.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.logits: dict[int, list[Tensor]] = {}
        self.num_steps = 0
        self.max_batch = 0
        sampler = engine._runner._sampler
        sample = sampler.sample

        def recording(logits: Tensor, seqs: Sequence[EngineSequence]) -> list[int]:
            for row, seq in zip(logits, seqs, strict=True):
                self.logits.setdefault(seq.seq_id, []).append(row.float().clone())
            self.max_batch = max(self.max_batch, len(seqs))
            return sample(logits, seqs)

        sampler.sample = recording

    def run(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[RequestOutput]:
        """All prompts queued at once; their outputs in order."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        ids = [self.engine.add_request(p, s) for p, s in zip(prompts, each, strict=True)]
        outputs = self.drain()
        return [outputs[i] for i in ids]

    def drain(self) -> dict[int, RequestOutput]:
        """Step until nothing is left."""
        outputs: dict[int, RequestOutput] = {}
        while self.engine.has_unfinished_requests:
            for output in self.step():
                outputs[output.request_id] = output
        return outputs

    def step(self) -> list[RequestOutput]:
        """One step, its accounting checked."""
        outputs = self.engine.step()
        self.engine.kv.check()
        self.num_steps += 1
        assert self.num_steps < 100_000, "the engine makes no progress"
        return outputs


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The generated ids of each output."""
    return [output.outputs[0].token_ids for output in outputs]
