"""Mixture of experts (arXiv 1701.06538): which experts a row goes to, and the sum of their results.

Every number of a row comes from that row alone, in a fixed order: each expert multiplies by itself,
ties go to the lowest index, and results are added in the order of the row's choices. So the bits of
a row do not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from nanoengine.config.model import ExpertsConfig
from nanoengine.models.stored_codes import CodedRows, CodedWeight, Weight, joined, numbers_of

Map = Callable[[Tensor], Tensor]  # [rows, a] -> [rows, b]
# [rows, hidden] -> as `route`, and what the experts see of the rows.
Router = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
ON_A_GPU = (
    'experts of numbers run on a GPU in bfloat16 only; set dtype="bfloat16" or quantization="int8"'
)
NOT_OF_8_ON_A_GPU = (
    "experts of numbers run on a GPU if what their products take is a multiple of 8, for PyTorch's "
    'grouped product; these take {} and {}: set device="cpu"'
)
IN_A_GRAPH = (
    "on this GPU PyTorch makes the host wait for each product of experts, which no graph can hold; "
    'set enforce_eager=True or quantization="int8"'
)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert: gate and up are [inner, hidden], down is [hidden, inner]. gate: None: its
    activation is "relu2". biases: of gate, then of up, [2 x inner], and of down, where there is a
    gate.
    """

    gate: Weight | None
    up: Weight
    down: Weight
    biases: tuple[Tensor, Tensor] | None = None

    @property
    def gate_up(self) -> list[Weight]:
        """What comes before the activation."""
        return [self.up] if self.gate is None else [self.gate, self.up]


@dataclass(frozen=True, slots=True)
class CodedExpert:
    """An expert of codes: gate_up is [2 x inner, hidden], or up alone; down is [hidden, inner]."""

    gate_up: CodedRows
    down: CodedRows
    biases: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, weights: ExpertWeights) -> CodedExpert | None:
        """None if its weights are no codes, or gate and up of two formats."""
        both, down = _only_rows(joined(weights.gate_up)), _only_rows(weights.down)
        return None if both is None or down is None else cls(both, down, weights.biases)

    @property
    def formats(self) -> tuple[str, str]:
        """Of both weights."""
        return self.gate_up.format, self.down.format


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen by what a router gives. choice_bias: fp32 [experts], added to the
    scores, or to the logits, for the choice alone. scale: fp32 [experts], by which the weights of
    the chosen are multiplied.
    """

    config: ExpertsConfig
    choice_bias: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The experts of a layer, which are read one at a time, and their router: [experts, hidden].

    router_bias: [experts]. shared: an expert to which every row goes; shared_gate: [1, hidden], of
    a sigmoid that its result is multiplied by. before_router: what the router sees of x, if it does
    not see what the experts do. latent: what makes the experts' x, [latent_size, hidden], and what
    is made of their sum, [hidden, latent_size].
    """

    router: Tensor
    routing: Routing
    experts: Iterable[ExpertWeights]
    router_bias: Tensor | None = None
    shared: ExpertWeights | None = None
    shared_gate: Tensor | None = None
    before_router: Map | None = None
    latent: tuple[Weight, Weight] | None = None


class Experts:
    """Sends each row to its experts and adds up what they give, an expert at a time."""

    def __init__(
        self,
        router: Router,
        experts: Sequence[tuple[Map, Map]],
        gather: Map | None,
    ) -> None:
        """experts: gate and up of each, and down. gather: on a rank, [choices, its columns of
        inner] -> those of all ranks; in the same order of choices on each.
        """
        self._router, self._experts, self._gather = router, experts, gather

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; on a rank, its columns of that."""
        ids, weights, x = self._router(x)
        tokens, top_k = ids.shape
        chosen = ids.flatten()
        counts = torch.bincount(chosen, minlength=len(self._experts)).tolist()
        hit = [(*expert, num) for expert, num in zip(self._experts, counts, strict=True) if num]
        nums = [num for *_, num in hit]
        places = chosen.argsort(stable=True)
        each = zip(hit, torch.split(places, nums), strict=True)
        gated = torch.cat([gate_up(x[rows // top_k]) for (gate_up, *_), rows in each])
        if self._gather is not None:
            gated = self._gather(gated)
        each = zip(hit, torch.split(gated, nums), strict=True)
        results = torch.cat([down(rows) for (_, down, _), rows in each])
        return add_up(_back(results, places).view(tokens, top_k, -1), weights)


class GroupedExperts:
    """The same in two products, and the host waits for nothing: a GPU can replay it."""

    def __init__(
        self,
        router: Router,
        experts: Iterable[ExpertWeights],
        count: int,
        gated: Map,
        gather: Map | None,
    ) -> None:
        """gated: activation(gate) * up of [rows, 2 * inner], or relu2 of [rows, inner]."""
        self._router, self._gated, self._gather = router, gated, gather
        biases: list[tuple[Tensor, Tensor]] = []
        for index, expert in enumerate(experts):
            *gate_up, down = map(numbers_of, (*expert.gate_up, expert.down))
            inner, hidden = gate_up[0].shape
            if index == 0:
                self._gate_up = down.new_empty(count, len(gate_up) * inner, hidden)
                self._down = down.new_empty(count, *down.shape)
            torch.cat(gate_up, out=self._gate_up[index])
            self._down[index] = down
            if expert.biases is not None:
                biases.append(expert.biases)
        of_gate_up, of_down = zip(*biases, strict=True) if biases else ((), ())
        self._biases = (torch.stack(of_gate_up), torch.stack(of_down)) if biases else None
        self._all = torch.arange(count, device=self._down.device)

    @property
    def host_waits(self) -> bool:
        """Whether the host waits all the same. On NVIDIA PyTorch has a kernel for compute
        capability 9 and 10, and multiplies one by one on others (GroupedBlas.cpp); AMD's is off by
        default.
        """
        if self._all.device.type != "cuda":
            return False
        major, _ = torch.cuda.get_device_capability(self._all.device)
        return torch.version.hip is not None or major not in (9, 10)

    def __call__(self, x: Tensor) -> Tensor:
        """As Experts."""
        ids, weights, x = self._router(x)
        tokens, top_k = ids.shape
        chosen, places = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, self._all, right=True).int()
        both = functional.grouped_mm(x[places // top_k], self._gate_up.mT, offs=ends)
        if self._biases is not None:
            both += self._biases[0][chosen]
        gated = self._gated(both)
        if self._gather is not None:
            gated = self._gather(gated)
        results = functional.grouped_mm(gated, self._down.mT, offs=ends)
        if self._biases is not None:
            results += self._biases[1][chosen]
        return add_up(_back(results, places).view(tokens, top_k, -1), weights)


def route(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [tokens, experts] -> the experts of each row, int64 [tokens, top_k], the first choice
    first, and their weights, fp32 [tokens, top_k].
    """
    config, scores = routing.config, SCORES[routing.config.scoring](logits)
    choice = logits if config.biases_logits else scores
    if routing.choice_bias is not None:
        choice = choice + routing.choice_bias
    if config.num_groups > 1:
        choice = _in_top_groups(config, choice)
    ids = _largest(choice, config.top_k)
    weights = scores.gather(1, ids)
    if config.renormalises:
        total = weights[:, :1] + config.least_sum
        for slot in range(1, config.top_k):
            total += weights[:, slot : slot + 1]
        weights = weights / total
    weights = weights * config.scaling
    return ids, weights if routing.scale is None else weights * routing.scale[ids]


def _in_top_groups(config: ExpertsConfig, choice: Tensor) -> Tensor:
    """-inf but in the top_groups of num_groups neighbourhoods, by their best experts: one
    (DeepSeek-V2, arXiv 2405.04434) or two (DeepSeek-V3, arXiv 2412.19437).
    """
    grouped = choice.view(len(choice), config.num_groups, -1)
    best = grouped.gather(2, _largest(grouped, config.group_best))
    kept = _largest(best[..., 0] + best[..., 1:].sum(-1), config.top_groups)
    mask = torch.full_like(best[..., 0], -torch.inf).scatter_(1, kept, 0.0)
    return (grouped + mask.unsqueeze(2)).flatten(1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the largest in the last dimension; of equals the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def sigmoid(logits: Tensor) -> Tensor:
    """In double: a vector's last elements go through other code than the first."""
    return logits.double().sigmoid().float()


# By ExpertsConfig.scoring. The softmax is over all experts; divided by the sum of the chosen, it is
# the softmax over these.
SCORES: dict[str, Map] = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": sigmoid}


def _only_rows(weight: Weight) -> CodedRows | None:
    parts = weight.parts if isinstance(weight, CodedWeight) else (weight,)
    return parts[0] if len(parts) == 1 and isinstance(parts[0], CodedRows) else None


def _back(results: Tensor, places: Tensor) -> Tensor:
    """results [choices, width], by expert, in the order of the rows' choices."""
    parts = results.new_empty(results.shape)
    parts[places] = results
    return parts


def add_up(parts: Tensor, weights: Tensor) -> Tensor:
    """The sum over slots of parts [tokens, top_k, hidden] times weights [tokens, top_k], in fp32
    and in the order of the slots, rounded once.
    """
    total = parts[:, 0].float() * weights[:, :1]
    for slot in range(1, parts.shape[1]):
        # Not one fused operator, which would round otherwise at the end of a vector.
        total += parts[:, slot].float() * weights[:, slot : slot + 1]
    return total.to(parts.dtype)
