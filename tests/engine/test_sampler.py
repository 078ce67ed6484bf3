"""Sampling: distributions against independent arithmetic, and what a seed depends on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from marks import needs_compiler

from nanoengine.engine.logprobs import score_tokens
from nanoengine.engine.sampler import Sampler, draw_key
from nanoengine.kernels.cpu_kernels import CpuKernels
from nanoengine.models.draw import exponentials
from nanoengine.models.layer_ops import LayerOps, TorchOps
from nanoengine.outputs import RequestMetrics
from nanoengine.sampling_params import SamplingParams
from nanoengine.sequence import NO_TOKEN, Request, Sequence, TokenHistory

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]
DRAWS = 20_000


def sequence(
    params: SamplingParams, seed: int = 0, num_out: int = 0, stops: frozenset[int] = frozenset()
) -> Sequence:
    tokens = [1] * (3 + num_out)
    return Sequence(0, tokens, 3, Request(params, seed, stops, 100), RequestMetrics(0.0))


@pytest.fixture(params=["torch", pytest.param("C", marks=needs_compiler)])
def ops(request: pytest.FixtureRequest, build_folder: Path) -> LayerOps:
    return TorchOps() if request.param == "torch" else CpuKernels.load(build_folder)


def choose(
    ops: LayerOps, logits: torch.Tensor, seqs: list[Sequence], num_ahead: int = 0
) -> list[int]:
    """num_ahead: tokens that are not appended yet."""
    sampler = Sampler(ops, lambda x, dtype: torch.tensor(x, dtype=dtype))
    return sampler.sample(logits, seqs, [s.num_tokens + num_ahead for s in seqs]).tolist()


def frequencies(ops: LayerOps, params: SamplingParams) -> list[float]:
    logits = torch.tensor([LOGITS]).expand(DRAWS, -1)
    tokens = choose(ops, logits, [sequence(params, seed) for seed in range(DRAWS)])
    return [tokens.count(token) / DRAWS for token in range(len(LOGITS))]


def test_a_row_is_drawn_from_as_if_it_were_alone(ops: LayerOps) -> None:
    """However many there are."""
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    kinds = [SamplingParams(top_p=0.8), SamplingParams(0.7, top_k=9), SamplingParams(min_p=0.1)]
    seqs = [sequence(kinds[row % 3], seed=row) for row in range(150)]
    alone = [choose(ops, logits[row : row + 1], [seqs[row]])[0] for row in range(150)]
    assert choose(ops, logits, seqs) == alone and len(set(alone)) > 10


def softmax(values: list[float]) -> list[float]:
    weights = [math.exp(v) for v in values]
    return [w / sum(weights) for w in weights]


def renormalised(probs: list[float], kept: list[int]) -> list[float]:
    mass = sum(probs[i] for i in kept)
    return [p / mass if i in kept else 0.0 for i, p in enumerate(probs)]


COLD = softmax([v / 0.7 for v in LOGITS])
PLAIN = softmax(LOGITS)
CASES = {
    "plain": (SamplingParams(), PLAIN),
    "temperature": (SamplingParams(temperature=0.7), COLD),
    "top_k": (SamplingParams(top_k=2), renormalised(PLAIN, [0, 1])),
    # 0.556 + 0.204 < 0.8 <= 0.556 + 0.204 + 0.124
    "top_p": (SamplingParams(top_p=0.8), renormalised(PLAIN, [0, 1, 2])),
    "top_p keeps one": (SamplingParams(top_p=0.01), renormalised(PLAIN, [0])),
    "min_p": (SamplingParams(min_p=0.2), renormalised(PLAIN, [0, 1, 2])),
    "top_k then top_p": (
        SamplingParams(top_k=3, top_p=0.75),
        # among the first three the likeliest two hold 0.86
        renormalised(PLAIN, [0, 1]),
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize(("params", "expected"), CASES.values(), ids=CASES)
def test_distribution(ops: LayerOps, params: SamplingParams, expected: list[float]) -> None:
    """Every frequency within five standard deviations, and nothing outside the kept set."""
    for seen, wanted in zip(frequencies(ops, params), expected, strict=True):
        assert abs(seen - wanted) <= 5 * math.sqrt(wanted * (1 - wanted) / DRAWS)


def test_greedy_beside_sampled_rows(ops: LayerOps) -> None:
    logits = torch.tensor([LOGITS, LOGITS[::-1], LOGITS])
    greedy = sequence(SamplingParams(temperature=0))
    tokens = choose(ops, logits, [greedy, greedy, sequence(SamplingParams(top_k=1))])
    assert tokens == [0, 5, 0]


def test_a_key_depends_on_seed_and_position_only() -> None:
    assert draw_key(1, 2) == draw_key(1, 2)
    keys = {draw_key(seed, position) for seed in range(-50, 50) for position in range(100)}
    assert len(keys) == 10_000 and min(keys) >= 0 and max(keys) < 1 << 64


def test_luck_is_exponential_and_independent() -> None:
    """By tokens, positions and seeds: moments, and the share of the smallest, which win."""
    keys = [draw_key(seed, position) for seed in range(20) for position in range(20)]
    halves = [[[float(part)] for part in half] for half in zip(*map(halves_of, keys), strict=True)]
    luck = exponentials([torch.tensor(half, dtype=torch.float64) for half in halves], 5000).double()
    number = luck.numel()
    assert luck.min() > 0 and torch.isfinite(luck).all()
    assert abs(luck.mean() - 1) < 5 / math.sqrt(number)
    assert abs(luck.var() - 1) < 5 * math.sqrt(8 / number)
    for share in (1e-4, 1e-2, 0.5, 0.99):
        seen = (luck < -math.log1p(-share)).double().mean()
        assert abs(seen - share) < 5 * math.sqrt(share * (1 - share) / number)
    apart = luck - 1
    for one, other in (
        (apart[:, 1:], apart[:, :-1]),
        (apart[1:], apart[:-1]),
        (apart[20:], apart[:-20]),
    ):
        assert abs((one * other).mean()) < 5 / math.sqrt(number - 5000 * 20)


def halves_of(key: int) -> tuple[int, int]:
    return key >> 32, key & 0xFFFFFFFF


def test_similar_rows_mostly_draw_the_same_token(ops: LayerOps) -> None:
    """Two rows with one key agree at least (1 - d) / (1 + d) of the time, if they are d apart. The
    inverse of the cumulative distribution would give 0.15, and this at least 0.74.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 500, generator=generator)
    other = logits + 0.3 * torch.randn(1, 500, generator=generator)
    distance = (logits.softmax(1) - other.softmax(1)).clamp(min=0).sum().item()
    seqs = [sequence(SamplingParams(), seed) for seed in range(DRAWS // 4)]
    first, second = (choose(ops, each.expand(len(seqs), -1), seqs) for each in (logits, other))
    agreed = sum(map(int.__eq__, first, second)) / len(seqs)
    assert agreed > (1 - distance) / (1 + distance) - 5 * math.sqrt(0.25 / len(seqs))


def test_min_tokens_holds_stops_back(ops: LayerOps) -> None:
    """The likeliest token is a stop: it may not come before min_tokens."""
    params = SamplingParams(temperature=0, min_tokens=2)
    for num_out, expected in ((0, 1), (1, 1), (2, 0)):
        seq = sequence(params, num_out=num_out, stops=frozenset({0}))
        assert choose(ops, torch.tensor([LOGITS]), [seq]) == [expected]


def test_min_tokens_ends_in_time_beside_another_adjustment(ops: LayerOps) -> None:
    """A logit_bias adjusts every row, so min_tokens must know by itself when it is over."""
    params = SamplingParams(temperature=0, min_tokens=2, logit_bias={5: 0.5})
    for num_out, expected in ((1, 1), (2, 0), (3, 0)):
        seq = sequence(params, num_out=num_out, stops=frozenset({0}))
        assert choose(ops, torch.tensor([LOGITS]), [seq]) == [expected]


def test_a_token_that_is_not_appended_yet_counts(ops: LayerOps) -> None:
    """Drawn ahead or in its turn: the same position, the same token; and min_tokens counts it."""
    logits = torch.tensor([LOGITS]).expand(200, -1)
    late = [sequence(SamplingParams(), seed, num_out=1) for seed in range(200)]
    early = [sequence(SamplingParams(), seed) for seed in range(200)]
    assert (
        choose(ops, logits, late)
        == choose(ops, logits, early, num_ahead=1)
        != choose(ops, logits, early)
    )
    params = SamplingParams(temperature=0, min_tokens=2)
    seq = sequence(params, num_out=1, stops=frozenset({0}))
    assert choose(ops, torch.tensor([LOGITS]), [seq], num_ahead=1) == [0]


def test_what_parameters_name_is_made_a_tensor_once(ops: LayerOps) -> None:
    """Thousands of ids would take milliseconds in every step."""
    sizes: list[int] = []

    def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.tensor(values, dtype=dtype)
        sizes.append(made.numel())
        return made

    params = SamplingParams(
        temperature=0,
        allowed_token_ids=[*range(300)],
        repetition_penalty=1.3,
        min_tokens=9,
    )
    seq = sequence(params, stops=frozenset(range(100)))
    seq.history = TokenHistory(frozenset(range(200)))
    sampler, logits = Sampler(ops, tensor), torch.linspace(1, 2, 400).unsqueeze(0)
    first = sampler.sample(logits, [seq], [3]).item()
    assert max(sizes) == 400, "a mask over the vocabulary"
    sizes.clear()
    seq.append(299)
    seq.history.add(299)
    assert (first, sampler.sample(logits, [seq], [4]).item()) == (299, 298)
    assert max(sizes) == 1, "the one token of the output"
    sizes.clear()
    other = sequence(params)
    other.prompt_owner, other.history = seq, TokenHistory(seq.history.prompt)
    assert sampler.sample(logits, [other], [3]).item() == 299
    assert max(sizes, default=0) <= 1, "completions of one prompt share them"


def test_a_token_of_prompt_and_output_is_penalised_once(ops: LayerOps) -> None:
    seq = sequence(SamplingParams(temperature=0, repetition_penalty=2.0))
    seq.history = TokenHistory(frozenset({0, 1}))
    seq.history.add(0)
    # 3 / 2 is more than 1.4, and 3 / 4 would be less.
    assert choose(ops, torch.tensor([[3.0, 1.0, 1.4]]), [seq]) == [0]
    seq.history.add(2)
    assert choose(ops, torch.tensor([[2.7, 1.0, 2.8]]), [seq]) == [2], "1.4 after a penalty; 1.35"


@pytest.mark.some(1)
def test_low_precision_rows_are_sampled_in_full_precision(ops: LayerOps) -> None:
    """bf16 logits with equal probabilities: no token is starved by rounding of the running sum."""
    vocab = 4096
    logits = torch.zeros(DRAWS, vocab, dtype=torch.bfloat16)
    tokens = choose(ops, logits, [sequence(SamplingParams(), seed) for seed in range(DRAWS)])
    late = sum(token >= vocab // 2 for token in tokens) / DRAWS
    assert abs(late - 0.5) < 5 * math.sqrt(0.25 / DRAWS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_has_no_finite_largest_logit_gives_no_token(
    ops: LayerOps, bad: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([LOGITS, LOGITS, [-torch.inf] * 5 + [1.0]], dtype=dtype)
    logits[1, 4] = bad
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=2)):
        first, second, third = choose(ops, logits, [sequence(params, 1)] * 3)
        assert 0 <= first < 6 and second == NO_TOKEN and third == 5
    only = SamplingParams(temperature=0, allowed_token_ids=[3, 4])
    assert choose(ops, logits[1:2], [sequence(only)]) == [NO_TOKEN]


def test_a_row_without_any_token_left_gives_none(ops: LayerOps) -> None:
    assert choose(ops, torch.full((1, 6), -torch.inf), [sequence(SamplingParams())]) == [NO_TOKEN]


@pytest.mark.parametrize("kernel", ["torch", pytest.param("C", marks=needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_of_a_row_depend_on_no_other(
    build_folder: Path, dtype: torch.dtype, kernel: str
) -> None:
    """Neither on how many are asked for nor on other rows: of equals the first ones, among them the
    token that a greedy request takes.
    """
    likeliest = TorchOps().likeliest
    if kernel == "C":
        likeliest = CpuKernels.load(build_folder).likeliest
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(40, 3000, generator=generator)).round().to(dtype)
    logits[3, 5], logits[4, 7:] = 80.0, -torch.inf  # one that is certain; few that are possible
    logprobs = torch.log_softmax(logits.float(), dim=1)
    values, ids = logprobs.sort(dim=1, descending=True, stable=True)
    tokens = logits.argmax(dim=1)
    assert torch.equal(tokens, ids[:, 0])
    for number in (0, 1, 2, 20, 2999, 5000):
        k = min(number, 3000)
        scores = score_tokens(logits, tokens, number, likeliest)
        assert torch.equal(scores[:, 2 : 2 + k], values[:, :k].double())
        assert torch.equal(scores[:, 2 + k :], ids[:, :k].double())
        alone = score_tokens(logits[7:8], tokens[7:8], number, likeliest)
        assert torch.equal(scores[7:8], alone)
