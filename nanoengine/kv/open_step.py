"""OpenStep: a step between its plan and its end, for the runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from torch import Tensor

from nanoengine.kv.block_heat import BlockHeat
from nanoengine.kv.draft_plan import DraftReads
from nanoengine.kv.kv_memory import KVMemory
from nanoengine.kv.step_kv import StepKV
from nanoengine.kv.step_planner import PlannedStep, StepPlanner
from nanoengine.sequence import ScheduledBatch
from nanoengine.sequence import Sequence as Request


@dataclass(frozen=True, slots=True)
class DraftStep:
    """A decode step of some items of a batch over the KV on the device. The step that checks it
    overwrites its KV. num_rows: as in OpenStep; items, positions, num_keys: of each row.
    """

    kv: StepKV
    num_rows: int
    items: tuple[int, ...]
    positions: tuple[int, ...]
    num_keys: tuple[int, ...]

    def sequences(self, batch: ScheduledBatch) -> list[Request]:
        """Those of its rows. batch: whose items draft."""
        return [batch.items[item].seq for item in self.items]


class OpenStep:
    """kv: what the forward pass writes and reads; num_rows: the sequences that it is laid out
    for; num_padding: as in StepPlan.
    """

    def __init__(
        self,
        planned: PlannedStep,
        batch: ScheduledBatch,
        memory: KVMemory,
        planner: StepPlanner,
        heat: BlockHeat,
    ) -> None:
        """heat: measures this step if sequences draft in it."""
        self._batch = batch
        self._planned = planned
        self._memory = memory
        self._planner = planner
        self._heat = heat
        self._before = replace(memory.counters)
        self.num_padding = planned.plan.num_padding
        self.num_rows = planned.plan.num_rows or len(batch.items) + self.num_padding
        self.kv = StepKV.open(planned.plan, memory, memory.start(planned.plan.transfers))

    @property
    def block_mass(self) -> Tensor | None:
        """See ForwardContext."""
        return self._heat.mass

    def draft_steps(self) -> Iterator[DraftStep]:
        """The draft steps in order; each must run before the next one is taken."""
        run, drafts = self.kv.run, self._planned.drafts
        if run is not None and drafts:  # copies fill the ring, and then wait for the drafts
            run.share_cores(False)
        for number in range(_most(drafts)):
            yield self._draft_step(drafts, number)
        if run is not None and drafts:
            run.share_cores(True)

    def draft_steps_between(self, layers: Iterator[object]) -> Iterator[DraftStep]:
        """The draft steps of resting sequences. An equal share of this step's layers runs between
        two of them, and the caller runs the last share: copies fill the ring while drafts run.
        """
        drafts, num_layers = self._planned.of_resting, len(self._memory.sources)
        ends = [num_layers * number // _most(drafts) for number in range(_most(drafts))]
        for number, (start, end) in enumerate(pairwise([0, *ends])):
            deque(islice(layers, end - start), maxlen=0)
            yield self._draft_step(drafts, number)

    def _draft_step(self, all_drafts: Sequence[DraftReads], number: int) -> DraftStep:
        drafts = [each for each in all_drafts if each.num_drafts > number]
        plan = self._planner.plan_draft(drafts, number)
        return DraftStep(
            StepKV.open(plan, self._memory),
            plan.num_rows or len(drafts),
            tuple(each.index for each in drafts),
            tuple(each.position(number) for each in drafts),
            tuple(each.num_keys(number, self._memory.block_size) for each in drafts),
        )

    def mark_written(self) -> None:
        """Every layer has stored its keys and values and replaced its states: set the lengths of
        the written blocks. They may now go to the host, and a step that begins ahead finds them.
        """
        with self._planner.blocks.at_once():
            for write in self._planned.writes:
                written = write.offset + write.num_tokens
                write.block.num_tokens = max(write.block.num_tokens, written)
            self._planner.states.end(self._batch)
            self._heat.end()

    def close(self) -> None:
        """Wait for copies under way; must be called whether the step succeeded or not."""
        with self._planner.blocks.at_once():
            if not self.kv.finish():
                self._planned.placement.undo_loads()
        streamed, before, now = self._planned.streamed, self._before, self._memory.counters
        for metrics in streamed:
            metrics.num_stalls += now.num_stalls - before.num_stalls
            metrics.num_prefetch_hits += now.num_prefetch_hits - before.num_prefetch_hits
            metrics.peak_streamed = max(metrics.peak_streamed, len(streamed))


def _most(drafts: Sequence[DraftReads]) -> int:
    return max((each.num_drafts for each in drafts), default=0)
