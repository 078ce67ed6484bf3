"""`bench.py compare`: runs nanoengine and other engines in turn on one workload, a process each.

Owns the workloads, the rounds and the result rows. peers.py sets up an engine in that engine's own
process; limits.py measures what the machine can do at best.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gguf_files import weights_of
from benchmarks.limits import (
    WEIGHT_BYTES,
    Model,
    measure_limits,
    rounded,
    share_of_limits,
    stored_bytes,
)
from benchmarks.peers import Work
from nanoengine.bench.report import versions
from nanoengine.bench.workload import random_requests
from nanoengine.errors import ConfigError, EngineError
from nanoengine.loading.find_model import resolve_model
from nanoengine.loading.model_config import read_model_config
from nanoengine.loading.packaged import DEMO_MODEL, packaged_gguf

Row = dict[str, Any]

OURS = "nanoengine"
SCRIPT = Path(__file__).with_name("peers.py")
BATCHING = (OURS, "vllm", "transformers", "openvino")
ALL = (*BATCHING, "llama.cpp")
KINDS_WITH_FILE = ("llama.cpp", "openvino")  # these read a GGUF, the others a Hugging Face folder
PEER_FORMS = "transformers, vllm=PYTHON, llama.cpp=PYTHON,GGUF or openvino=PYTHON,GGUF"
SIXTEEN_BITS = ("BF16", "F16")
KV_GIB = 2
MAX_MODEL_LEN = 8192
STDERR_CHARS = 2000


class WorkerError(EngineError):
    """The process of one engine failed; the message ends with what it wrote last."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A workload. figure: what its rows show; for "seconds", smaller is better.

    shape: requests, then fewest and most input and output tokens of each. prefix: tokens that all
    prompts begin with. engines: the engines that can run it. sampling: how tokens are drawn; {}:
    greedily.
    """

    figure: str
    shape: tuple[int, ...]
    prefix: int = 0
    parts: tuple[str, ...] = ("run",)
    engines: tuple[str, ...] = ALL
    is_warm: bool = True
    sampling: Mapping[str, float] = field(default_factory=dict)


QWENS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # what the model cards of Qwen 3 ask for
WORKS = {
    "offline": Kind("output_tokens_per_s", (32, 64, 512, 64, 256), engines=BATCHING),
    "sampled": Kind(
        "output_tokens_per_s", (32, 64, 512, 64, 256), engines=BATCHING, sampling=QWENS
    ),
    "single": Kind("output_tokens_per_s", (1, 128, 128, 256, 256)),
    "prefill": Kind("input_tokens_per_s", (1, 4096, 4096, 1, 1)),
    "long": Kind("seconds", (1, 8000, 8000, 32, 32)),
    "prefix": Kind(
        "output_tokens_per_s",
        (16, 32, 32, 64, 64),
        prefix=2048,
        parts=("cold", "warm"),
        engines=(OURS, "vllm", "openvino"),
    ),
    "startup": Kind("seconds", (1, 8, 8, 1, 1), is_warm=False),
    # For models of 1B and more, which take long.
    "short-single": Kind("output_tokens_per_s", (1, 64, 64, 64, 64)),
    "short-prefill": Kind("input_tokens_per_s", (1, 1024, 1024, 1, 1)),
    "short-batch": Kind("output_tokens_per_s", (8, 64, 256, 48, 48), engines=BATCHING),
}


ROUNDED = ", activations of 8 bits"
KV_NAMES = {"bfloat16": "bf16", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to run: `model` is what it loads, `weights` and `kv` their precision. activations:
    "int8" where it is asked for that.
    """

    name: str
    kind: str
    python: str
    model: str
    weights: str = "BF16"
    kv: str = "bf16"
    activations: str = ""

    @property
    def precision(self) -> str:
        """Precision of weights and KV, as text, and of activations if it is less."""
        text = f"weights {self.weights}, KV {'u8' if self.kv == 'default' else self.kv}"
        return text + ROUNDED if self.rounds_activations else text

    @property
    def rounds_activations(self) -> bool:
        """Whether it multiplies 8-bit integers."""
        if self.weights in SIXTEEN_BITS:
            return False
        can_choose = self.kind == OURS or (self.kind == "openvino" and self.kv != "default")
        return self.activations == "int8" or not can_choose

    def with_kv(self, kv: str) -> Peer:
        """The same with KV in another type, if it is not to have its own choice."""
        if self.kv == "default":
            return self
        return replace(self, kv=kv, name=self.name.replace(f"KV {self.kv}", f"KV {kv}"))

    def is_equal(self, ours: Peer) -> bool:
        """Whether weights and KV have nanoengine's precision, which a ratio needs."""
        both = {self.weights, ours.weights}
        return self.kv == ours.kv and (len(both) == 1 or both <= set(SIXTEEN_BITS))


def compare(args: argparse.Namespace) -> Row:
    """Run all engines in turn, `rounds` times; returns a row for each engine and part of the work.

    A row has the figure of each round with its median, min and max; `ratio` is nanoengine over the
    peer (above 1: nanoengine is faster), round by round. It is left out where token counts or
    precision differ; `note` gives the reason. If an engine fails, its row has `error` and the other
    engines go on.
    """
    folder = resolve_model(args.model, keeps_codes=args.weights == "stored")
    config = read_model_config(folder)
    ours = own_peer(args.model, args.weights, KV_NAMES[args.dtype])
    own = [ours] if ours.weights in SIXTEEN_BITS else [ours, _rounding(ours)]
    peers = [*own, *(peer.with_kv(ours.kv) for peer in given_peers(args.peer, folder))]
    kind = _rehearsal(WORKS[args.work]) if args.rehearsal else WORKS[args.work]
    work = make_work(kind, args, config.vocab_size)
    able = [peer for peer in peers if peer.kind in kind.engines]
    load = os.getloadavg()[0]
    limits = measure_limits(args.num_threads, dtype=getattr(torch, args.dtype))
    runs = run_rounds(able, work, args.rounds, args.timeout_s, discard=not kind.is_warm)
    weight_bytes = WEIGHT_BYTES if args.weights == "numbers" else stored_bytes(folder, config)
    kv_bytes = float(getattr(torch, args.dtype).itemsize)
    model = Model(config, kind.prefix, limits, weight_bytes, kv_bytes)
    rows = [row for part in kind.parts for row in make_rows(kind, part, able, runs, model)]
    rows += [
        {"engine": p.name, "note": "not run: cannot do this work"} for p in peers if p not in able
    ]
    print(_table(rows), file=sys.stderr)
    return {
        "workload": {
            "name": args.work,
            "model": args.model,
            "seed": args.seed,
            "rounds": args.rounds,
            **{k: v for k, v in asdict(kind).items() if k not in ("engines", "is_warm")},
            "input_tokens": sum(map(len, work.prompts)),
            "output_tokens": sum(work.max_tokens),
            "kv_gib": KV_GIB,
            "dtype": args.dtype,
            "weights": ours.weights,
        },
        "machine": {
            "cpu": cpu_name(),
            "threads": args.num_threads,
            "load_average_before": round(load, 2),
            **asdict(limits),
        },
        "best_peer": _best_peers(rows),
        "rows": rows,
    }


def _rounding(peer: Peer) -> Peer:
    return replace(peer, name=peer.name + ROUNDED, activations="int8")


def _best_peers(rows: Iterable[Row]) -> dict[str, str]:
    """For each part of the work, the fastest peer at equal precision; those that round their
    activations are parts of their own.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if "ratio" not in row:
            continue
        part = row["part"] + (ROUNDED if row["precision"].endswith(ROUNDED) else "")
        if part not in best or row["ratio"]["median"] < best[part]["ratio"]["median"]:
            best[part] = row
    return {part: row["engine"] for part, row in best.items()}


def own_peer(model: str, weights: str, kv: str) -> Peer:
    """Ourselves. Raises ConfigError if `weights` are "stored" and the model is no GGUF."""
    if weights == "numbers":
        return Peer(OURS, OURS, sys.executable, model, kv=kv)
    path = packaged_gguf(model) if model == DEMO_MODEL else Path(model)
    if not path.is_file():
        raise ConfigError(f"--weights stored: {model!r} is no GGUF; give one, or --weights numbers")
    return Peer(OURS, OURS, sys.executable, model, weights_of(path), kv)


def parse_peer(text: str) -> list[Peer]:
    """The engines that a --peer names; OpenVINO runs with bf16 KV and with its default KV, and with
    codes also with bf16 KV and activations of 8 bits.

    `model` is empty for engines that read no GGUF. Raises ConfigError for a text that is not one of
    PEER_FORMS, and for a missing file.
    """
    kind, _, rest = text.partition("=")
    if kind not in ALL or kind == OURS:
        near = difflib.get_close_matches(kind, ALL[1:], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no peer is called {kind!r}: give {PEER_FORMS}{hint}")
    given = rest.split(",") if rest else []
    wanted = 2 if kind in KINDS_WITH_FILE else 1
    if kind == "transformers" and not given:
        given = [sys.executable]
    if len(given) != wanted or not all(given):
        form = f"{kind}=PYTHON,GGUF" if wanted == 2 else f"{kind}=PYTHON"
        raise ConfigError(f"--peer {text!r}: give {form}")
    python = shutil.which(os.path.expanduser(given[0]))
    if python is None:
        raise ConfigError(
            f"--peer {text!r}: there is no program {given[0]!r}; give its interpreter"
        )
    if wanted == 1:
        return [Peer(kind, kind, python, "")]
    file = Path(given[1]).expanduser()
    if not file.is_file():
        raise ConfigError(f"--peer {text!r}: there is no file {given[1]!r}")
    return _peers_with_file(kind, python, file)


def _peers_with_file(kind: str, python: str, file: Path) -> list[Peer]:
    weights = weights_of(file)
    name = f"{kind} {weights}"
    if kind == "openvino":
        peers = [
            Peer(f"{name}, KV {kv}", kind, python, str(file), weights, setting)
            for kv, setting in (("bf16", "bf16"), ("u8", "default"))
        ]
        return peers if weights in SIXTEEN_BITS else [*peers, _rounding(peers[0])]
    return [Peer(name, kind, python, str(file), weights)]


def given_peers(given: Iterable[list[Peer]], folder: Path) -> list[Peer]:
    """All peers; those without a file get the model's Hugging Face folder.

    Raises ConfigError for a peer that is given twice.
    """
    peers = [
        replace(peer, model=peer.model or str(folder)) for several in given for peer in several
    ]
    names = [peer.name for peer in peers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--peer names {', '.join(twice)} twice; rows go by these names")
    return peers


def peer_argument(text: str) -> list[Peer]:
    """parse_peer for argparse, which then shows the error with the command's usage."""
    try:
        return parse_peer(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _rehearsal(kind: Kind) -> Kind:
    """The same workload with tiny sizes."""
    shape = (min(kind.shape[0], 2), *(max(1, length // 16) for length in kind.shape[1:]))
    return replace(kind, shape=shape, prefix=kind.prefix // 8)


def make_work(kind: Kind, args: argparse.Namespace, vocab_size: int) -> Work:
    """Make the prompts from seed and sizes only; the rest is filled in per engine."""
    names = ("num_seqs", "min_input", "max_input", "min_output", "max_output")
    sizes = argparse.Namespace(seed=args.seed, **dict(zip(names, kind.shape, strict=True)))
    requests = list(random_requests(sizes, sizes.num_seqs, vocab_size))
    rng = random.Random(args.seed + 1)
    shared = [rng.randrange(vocab_size) for _ in range(kind.prefix)]
    warm_up = [[rng.randrange(vocab_size) for _ in range(64)] for _ in range(2)]
    return Work(
        model="",
        prompts=[shared + prompt for prompt, _ in requests],
        max_tokens=[max_tokens for _, max_tokens in requests],
        parts=list(kind.parts),
        warm_up=warm_up if kind.is_warm else [],
        warm_up_tokens=8,
        num_threads=args.num_threads,
        kv_gib=KV_GIB,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=kind.prefix > 0,
        kv=KV_NAMES[args.dtype],
        dtype=args.dtype,
        keeps_codes=args.weights == "stored",
        activations="",
        sampling=dict(kind.sampling),
    )


def run_rounds(
    peers: Sequence[Peer], work: Work, rounds: int, timeout_s: float, discard: bool = False
) -> dict[str, list[Row] | str]:
    """The result of each peer's process in each round, or its error text, by the peer's name.

    Peers take turns, so that a machine that slows down slows all of them. discard: run one round
    more before the first and do not count it. A peer that failed is not run again.
    """
    runs: dict[str, Any] = {peer.name: [] for peer in peers}
    with tempfile.TemporaryDirectory(prefix="nanoengine-compare-") as folder:
        for number in range(-1 if discard else 0, rounds):
            for peer in peers:
                if isinstance(runs[peer.name], str):
                    continue
                print(f"round {number + 1} of {rounds}: {peer.name}", file=sys.stderr, flush=True)
                try:
                    said = run_worker(peer, work, Path(folder), timeout_s)
                except WorkerError as error:
                    print(error, file=sys.stderr, flush=True)
                    runs[peer.name] = str(error)
                    continue
                if number >= 0:
                    runs[peer.name].append(said)
    return runs


def run_worker(peer: Peer, work: Work, folder: Path, timeout_s: float) -> Row:
    """Run one engine in its process; returns its last line with `first_token_s` since the start.

    Raises WorkerError with the end of its standard error if it fails, hangs or prints nothing.
    """
    task = folder / "work.json"
    own = {"model": peer.model, "kv": peer.kv, "activations": peer.activations}
    task.write_text(json.dumps(asdict(work) | own))
    command = [peer.python, str(SCRIPT), peer.kind, str(task)]
    with (folder / "stderr").open("w+b") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=_environment(peer),
            text=True,
        )
        said, first_token_s, is_late = _listen(process, start, timeout_s)
        if process.returncode == 0 and said and first_token_s is not None:
            return said | {"first_token_s": first_token_s}
        stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_CHARS))
        end = stderr.read().decode(errors="replace").strip()
    how = f"took more than {timeout_s:g} s" if is_late else f"ended with {process.returncode}"
    raise WorkerError(f"{peer.name} {how}, its last words:\n{end or '(none)'}")


def _listen(
    process: subprocess.Popen[str], start: float, timeout_s: float
) -> tuple[Row | None, float | None, bool]:
    """The worker's last result, the time of its first token, and whether it was stopped."""
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(timeout_s, stop)
    timer.start()
    try:
        with process:
            try:
                said, first_token_s = _read(process.stdout or (), start)
            except BaseException:
                process.kill()
                raise
    finally:
        timer.cancel()
    return said, first_token_s, is_late.is_set()


def _read(lines: Iterable[str], start: float) -> tuple[Row | None, float | None]:
    """The last result among a worker's lines, and the time of its first token."""
    said, first_token_s = None, None
    for line in lines:
        now = time.perf_counter() - start
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if "event" in message:
            first_token_s = now if first_token_s is None else first_token_s
        else:
            said = message
    return said, first_token_s


def _environment(peer: Peer) -> dict[str, str]:
    """Our own interpreter finds this package; another one must not see our packages."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    if peer.python == sys.executable:
        paths = [str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def make_rows(
    kind: Kind, part: str, peers: Sequence[Peer], runs: Mapping[str, list[Row] | str], model: Model
) -> list[Row]:
    """One row per peer for one part of the work; nanoengine is the first of `peers`. A peer stands
    beside ours with the same activations, and one that rounds them also beside the exact ones.
    """
    exact = peers[0]
    mine = {peer.rounds_activations: peer for peer in reversed(peers) if peer.kind == OURS}
    rows = []
    for peer in peers:
        own = runs[peer.name]
        head: Row = {"part": part, "engine": peer.name, "precision": peer.precision}
        if isinstance(own, str):
            rows.append(head | {"error": own})
            continue
        row = head | _measured(kind, part, own)
        if peer.kind != OURS:
            alike = mine.get(peer.rounds_activations, exact)
            row |= _against(kind, part, peer, alike, runs[alike.name], own)
            if alike is not exact and "ratio" in row:
                beside = _against(kind, part, peer, exact, runs[exact.name], own)
                row["ratio_to_exact"] = beside.get("ratio")
        elif kind.is_warm:
            like_it = replace(model, rounds_activations=peer.rounds_activations)
            row |= share_of_limits([said["parts"][part] for said in own], like_it)
        rows.append(row)
    return rows


def _measured(kind: Kind, part: str, own: list[Row]) -> Row:
    figures = [_figure(kind, part, said) for said in own]
    last = own[-1]["parts"][part]
    return {
        "version": own[-1]["version"],
        kind.figure: _spread(figures),
        "rounds": [rounded(x) for x in figures],
        "input_tokens": sum(last["input_tokens"]),
        "output_tokens": sum(map(len, last["outputs"])),
        "cached_tokens": sum(last["num_cached"]),
        "peak_memory_mib": round(max(said["peak_memory_mib"] for said in own)),
        "first_token_s": _spread([said["first_token_s"] for said in own]),
    }


def _figure(kind: Kind, part: str, said: Row) -> float:
    if not kind.is_warm:
        return float(said["first_token_s"])
    run = said["parts"][part]
    if kind.figure == "seconds":
        return float(run["seconds"])
    if kind.figure == "input_tokens_per_s":
        return float(sum(run["input_tokens"]) / run["seconds"])
    return float(sum(map(len, run["outputs"])) / run["seconds"])


def _against(
    kind: Kind, part: str, peer: Peer, mine: Peer, ours: list[Row] | str, own: list[Row]
) -> Row:
    """The ratio to nanoengine with its spread, or the reason for leaving it out."""
    if isinstance(ours, str):
        return {"note": f"no ratio: {OURS} failed"}
    if counts := _different_counts(part, ours, own):
        return {"note": f"no ratio: {counts}"}
    note = _agreement(part, ours[0], own[0])
    if not peer.is_equal(mine):
        return {"note": f"no ratio: not at equal precision; {note}"}
    pairs = [
        (_figure(kind, part, a), _figure(kind, part, b)) for a, b in zip(ours, own, strict=True)
    ]
    ratios = [b / a if kind.figure == "seconds" else a / b for a, b in pairs]
    return {"ratio": _spread(ratios), "note": note}


def _different_counts(part: str, ours: list[Row], own: list[Row]) -> str:
    """How token counts differ in any round or request; empty if they are equal."""
    for a, b in zip(ours, own, strict=True):
        mine, theirs = (_counts(said["parts"][part]) for said in (a, b))
        if mine != theirs:
            here, there = (
                f"{sum(num_in for num_in, _ in counts)} in and {sum(out for _, out in counts)} out"
                for counts in (mine, theirs)
            )
            return f"token counts differ, {here} here, {there} there"
    return ""


def _counts(run: Row) -> list[tuple[int, int]]:
    """Tokens in and out of each request."""
    return list(zip(run["input_tokens"], map(len, run["outputs"]), strict=True))


def _agreement(part: str, ours: Row, own: Row) -> str:
    """How many requests have the same first token: few would mean another model."""
    pairs = list(zip(ours["parts"][part]["outputs"], own["parts"][part]["outputs"], strict=True))
    return f"{sum(a[:1] == b[:1] for a, b in pairs)} of {len(pairs)} first tokens equal"


def _spread(values: Sequence[float]) -> Row:
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
    }


def cpu_name() -> str:
    """What the kernel calls this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")


def _table(rows: Sequence[Row]) -> str:
    lines = [f"{'part':6} {'engine':48} {'median (min-max)':28} {'ratio':22} {'MiB':>6}  note"]
    for row in rows:
        figure = next((row[k.figure] for k in WORKS.values() if k.figure in row), None)
        note = str(row.get("error", row.get("note", ""))).partition("\n")[0]
        lines.append(
            f"{row.get('part', ''):6} {row['engine']:48} {_words(figure):28} "
            f"{_words(row.get('ratio')):22} {row.get('peak_memory_mib', ''):>6}  {note}"
        )
    return "\n".join(lines)


def _words(spread: Row | None) -> str:
    return "-" if spread is None else "{median:g} ({min:g}-{max:g})".format(**spread)


def add_commands(commands: Any) -> None:
    """Add `compare`."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    sub = commands.add_parser(
        "compare", help="nanoengine and other engines, alternately", formatter_class=formatter
    )
    sub.set_defaults(run=lambda args: {"versions": versions()} | compare(args))
    sub.add_argument("--work", required=True, choices=WORKS, help="what to do")
    sub.add_argument(
        "--peer", action="append", default=[], type=peer_argument, metavar="PEER", help=PEER_FORMS
    )
    sub.add_argument("--rounds", type=int, default=5, help="times each engine runs")
    sub.add_argument("--rehearsal", action="store_true", help="tiny sizes, to test that all run")
    sub.add_argument("--model", default=DEMO_MODEL, help="folder, .gguf file or smollm2-135m")
    sub.add_argument(
        "--weights",
        choices=("numbers", "stored"),
        default="numbers",
        help="of 16 bits; or the codes of the GGUF --model, for peers that read such files",
    )
    sub.add_argument(
        "--dtype", choices=KV_NAMES, default="bfloat16", help="of KV and of what is computed"
    )
    sub.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    cores = len(os.sched_getaffinity(0))
    sub.add_argument("--num-threads", type=int, default=cores, help="CPU threads of every engine")
    sub.add_argument("--timeout-s", type=float, default=1800, help="for one engine in one round")
    sub.add_argument("--json", metavar="FILE", help="also write the result here, indented")
