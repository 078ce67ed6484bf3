"""OpenStep: a step between its plan and its end, for the runner."""

from __future__ import annotations

from dataclasses import replace

from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_planner import PlannedStep


class OpenStep:
    """kv: what the forward pass writes and reads; num_rows: the sequences that it is laid out
    for.
    """

    def __init__(self, planned: PlannedStep, num_seqs: int, memory: KVMemory) -> None:
        """num_seqs: sequences of the batch."""
        self._planned = planned
        self._counters = memory.counters
        self._before = replace(memory.counters)
        self.num_rows = planned.plan.num_rows or num_seqs
        self.kv = StepKV.open(planned.plan, memory)

    def mark_written(self) -> None:
        """Every layer has stored its keys and values. From here on they may go to the host, and a
        step that is planned before this one is committed finds the blocks as they will be.
        """
        for write in self._planned.writes:
            write.block.num_tokens = max(write.block.num_tokens, write.offset + write.num_tokens)

    def close(self) -> None:
        """Wait for what is still under way; to be called whether the step succeeded or not."""
        if not self.kv.finish():
            self._planned.placement.undo_loads()
        streamed, before, now = self._planned.streamed, self._before, self._counters
        for metrics in streamed:
            metrics.num_stalls += now.num_stalls - before.num_stalls
            metrics.num_prefetch_hits += now.num_prefetch_hits - before.num_prefetch_hits
            metrics.peak_streamed = max(metrics.peak_streamed, len(streamed))
