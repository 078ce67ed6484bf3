"""NcclGroup over what stands for NCCL (virtual_nccl.py): what it gathers, and how it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import needs_no_gpu
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from virtual_gpu import VirtualGpu
from virtual_nccl import Calls, VirtualNccl, Wires

from nanoengine import ConfigError, EngineError
from nanoengine.devices.cuda import CudaDevice
from nanoengine.devices.gpu import find_graphs
from nanoengine.workers import nccl_group
from nanoengine.workers.nccl_group import NcclGroup

pytestmark = needs_no_gpu
WIDTHS = (3, 0, 2)


class Ranks:
    """Calls of three ranks at once, each on a thread with its GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, first: VirtualGpu) -> None:
        self.gpus = [first, first.another(), first.another()]
        self.wires = Wires(3, Calls())
        self.made: list[Any] = [None] * 3
        patch.setattr(
            nccl_group,
            "make_collectives",
            lambda store, rank, size: VirtualNccl(self.wires, rank, self.gpus[rank]),
        )

    def meet(self, timeout_s: float = 20.0, graphs: bool = True) -> None:
        """Each rank makes its group."""

        def make(rank: int) -> None:
            device = CudaDevice(f"cuda:{rank}")
            how = find_graphs(device.torch_device) if graphs else None
            self.made[rank] = NcclGroup(Path("store"), rank, 3, device, how, timeout_s)

        self.at_once(make)

    def at_once(self, call: Callable[[int], Any]) -> list[Any]:
        """What each rank gets; a tensor as it is on the host."""

        def run(rank: int) -> Any:
            if rank == 0:
                return self._read(call(rank))
            with self.gpus[rank]:
                return self._read(call(rank))

        with ThreadPoolExecutor(2) as pool:
            others = [pool.submit(run, rank) for rank in (1, 2)]
            return [run(0), *(other.result() for other in others)]

    def _read(self, found: Any) -> Any:
        if not isinstance(found, Tensor):
            return found
        with torch._C.DisableTorchFunction():
            return found.clone()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    with VirtualGpu() as first:
        made = Ranks(monkeypatch, first)
        made.meet()
        yield made


def part_of(rank: int, dtype: torch.dtype, rows: int = 4) -> tuple[Tensor, Tensor]:
    """A rank's part, whose rows do not lie end to end, and the whole."""
    whole = torch.arange(rows * 5, dtype=torch.float64).view(rows, 5).to(dtype)
    start = sum(WIDTHS[:rank])
    mine = whole.to(f"cuda:{rank}")[:, start : start + WIDTHS[rank]]
    return mine, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("rows", [4, 1, 0])
def test_columns_are_in_order_of_rank(ranks: Ranks, dtype: torch.dtype, rows: int) -> None:
    def gather(rank: int) -> Tensor:
        part, _ = part_of(rank, dtype, rows)
        found: Tensor = ranks.made[rank].gather(part, WIDTHS)
        return found

    def to_first(rank: int) -> Tensor | None:
        part, _ = part_of(rank, dtype, rows)
        found: Tensor | None = ranks.made[rank].gather_to_first(part, WIDTHS)
        return found

    for found in ranks.at_once(gather):
        whole = torch.arange(rows * 5, dtype=torch.float64).view(rows, 5).to(dtype)
        assert found.dtype == dtype and found.is_contiguous()
        assert found.tolist() == whole.tolist()
    first, *others = ranks.at_once(to_first)
    assert first.tolist() == whole.tolist() and others == [None, None]


def test_all_have_what_rank_0_has(ranks: Ranks) -> None:
    def tell(rank: int) -> Tensor:
        found: Tensor = ranks.made[rank].broadcast(
            torch.full((2, 3), rank + 7, device=f"cuda:{rank}")
        )
        return found

    assert all((found == 7).all() for found in ranks.at_once(tell))


def test_wrong_tensors_are_refused(ranks: Ranks) -> None:
    group = ranks.made[0]
    with pytest.raises(EngineError, match=r"on cuda: got torch\.float32 on cpu"):
        group.gather(torch.zeros(2, 3), WIDTHS)
    with pytest.raises(EngineError, match="rows of 3 values"):
        group.gather(torch.zeros(2, 2, device="cuda:0"), WIDTHS)


def test_an_abort_ends_the_hosts_wait(ranks: Ranks) -> None:
    """Rank 0 alone has called: its GPU never ends that, and the host would look for ever."""
    group, gpu = ranks.made[0], ranks.gpus[0]
    ranks.wires.leave(1)
    part, _ = part_of(0, torch.float32)
    group.gather(part, WIDTHS)

    def abort() -> None:
        assert gpu.is_stuck.wait(20)
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(EngineError, match="group of ranks has ended: it was aborted"):
        group._device.read_back(part).tolist()
    thread.join()
    with pytest.raises(EngineError, match="it was aborted"):
        group.gather(part, WIDTHS)
    group._device.close_streams()
    group.close()


def test_the_host_does_not_wait_longer_than_it_may(ranks: Ranks) -> None:
    group = ranks.made[0]
    group._timeout_s = 0.05
    ranks.wires.leave(2)
    part, _ = part_of(0, torch.float32)
    group.gather(part, WIDTHS)
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"a rank did not come within 0\.05 s"):
        group._device.synchronize()
    assert 0.05 < time.monotonic() - begin < 10


def test_an_end_that_hangs_is_left_behind(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own may; and after it nothing can be called."""
    hangs = threading.Event()
    monkeypatch.setattr(VirtualNccl, "abort", lambda self: hangs.wait(200))
    monkeypatch.setattr(nccl_group, "ABORT_S", 0.05)
    begin = time.monotonic()
    ranks.made[0].close()
    ranks.made[0].close()
    assert time.monotonic() - begin < 60
    with pytest.raises(EngineError, match="it was closed"):
        ranks.made[0].broadcast(torch.zeros(1, device="cuda:0"))
    hangs.set()


@pytest.mark.parametrize("lost", ["gather", "broadcast"])
def test_graphs_that_lose_a_call_are_found_at_the_start(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """One whose result the replay does not renew."""
    call = VirtualNccl._call

    def eager(self: VirtualNccl, what: str, given: Tensor, write: Any, options: Any) -> Any:
        capturing = self._gpu._capturing
        if what == lost:
            self._gpu._capturing = None
        call(self, what, given, write, options)
        self._gpu._capturing = capturing

    with VirtualGpu() as first:
        ranks = Ranks(monkeypatch, first)
        monkeypatch.setattr(VirtualNccl, "_call", eager)
        with pytest.raises(EngineError, match=r"of 18 values differ; set enforce_eager=True"):
            ranks.meet()
        ranks.meet(graphs=False)
        assert not any(group.can_replay for group in ranks.made)


def test_nccl_is_asked_to_end_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By variables that it reads when it is made, and that the user has as before then."""
    seen: list[dict[str, str | None]] = []

    class Nccl:
        Options = staticmethod(lambda: None)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.append({name: os.environ.get(name) for name in nccl_group.QUIET})

    monkeypatch.setattr(nccl_group.c10d, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    nccl_group.make_collectives(tmp_path / "store", 0, 2)
    assert seen == [nccl_group.QUIET] and set(nccl_group.QUIET.values()) == {"0"}
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


@pytest.mark.skipif(hasattr(nccl_group.c10d, "ProcessGroupNCCL"), reason="this PyTorch has NCCL")
def test_a_pytorch_without_nccl_says_so() -> None:
    with pytest.raises(ConfigError, match="needs PyTorch with NCCL"):
        nccl_group.check_nccl()
