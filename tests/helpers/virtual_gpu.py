"""A GPU made of the CPU, for what no test could see without one: which tensors lie where, when
the host waits, what a graph replays, and how long a step would take.

While it is entered, `torch.cuda` is a stand-in, or, for an accelerator, `torch.accelerator` and
`torch.Stream` are, so that CudaDevice or AcceleratorDevice, CudaGraphs and everything above them
run as they are; Triton's kernels are interpreted. Numbers are computed at once, in the order in
which work is queued; time is virtual. Streams run in order, wait for events, and begin no work
before the host has queued it; queueing takes the host no time.

`another` adds a GPU to the machine. A thread that enters one has it as its current device, with a
clock and streams of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

from nanoengine.devices import gpu as gpu_module
from nanoengine.devices.cuda import CYCLES_PER_S
from nanoengine.devices.gpu import GpuDevice

GET_DEVICE = Tensor.device.__get__
GET_IS_CUDA = Tensor.is_cuda.__get__
# What copies between host and GPU, and may be told so.
TRANSFERS = {"copy_", "_foreach_copy_"}
# What the host cannot have without waiting for the GPU.
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
READS |= {"nonzero", "masked_select", "unique", "argwhere", "equal", "allclose"}
# What only makes room: not to be done again.
MAKES_ROOM = {"empty", "new_empty", "empty_like", "resize_"}


class WrongPlaceError(AssertionError):
    """Tensors of the host and of the GPU, or of two GPUs, in one operation."""


class HostWaitError(AssertionError):
    """The host would wait for the GPU where it was told not to."""


@dataclass
class Costs:
    """Seconds: of an operation (a kernel) on the GPU, of one block of keys that attention folds;
    and what copies between host and GPU do in a second.
    """

    operation_s: float = 0.0
    block_s: float = 0.0
    link_bytes_per_s: float = float("inf")


class VirtualEvent:
    """torch.cuda.Event and torch.Event."""

    def __init__(self, gpu: VirtualGpu, time: float) -> None:
        self._gpu, self.time = gpu, time

    def query(self) -> bool:
        return self.time <= self._gpu.host_time

    def synchronize(self) -> None:
        self._gpu.wait_until(self.time)


class VirtualStream:
    """torch.cuda.Stream and torch.Stream. time: when all that was queued is done; busy: how long
    it works.
    """

    device = torch.device("cpu")  # where tensors made for it really are

    def __init__(self, gpu: VirtualGpu) -> None:
        self.gpu = gpu
        self.time = self.busy = 0.0
        gpu.streams.append(self)

    def work(self, seconds: float) -> None:
        self.time = max(self.time, self.gpu.host_time) + seconds
        self.busy += seconds

    def record_event(self) -> VirtualEvent:
        return VirtualEvent(self.gpu, self.time)

    def wait_event(self, event: VirtualEvent) -> None:
        self.time = max(self.time, event.time)

    def __enter__(self) -> None:
        self._before, self.gpu.current = self.gpu.current, self

    def __exit__(self, *_: object) -> None:
        self.gpu.current = self._before


Work = Callable[[], None]


@dataclass
class VirtualGraph:
    """torch.cuda.CUDAGraph and torch.xpu.XPUGraph: what was queued while it was captured.

    made: the numbers that it holds. later: graphs that were captured later into the same pool: what
    they hold may lie where this one's temporary tensors did, so a replay leaves NaN there.
    """

    work: list[Work] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    later: list[VirtualGraph] = field(default_factory=list)
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        with torch._C.DisableTorchFunction():
            for tensor in chain(*(graph.made for graph in self.later)):
                tensor.fill_(torch.nan)
        for each in self.work:
            each()


class VirtualGpu(TorchFunctionMode):
    """Enter it, and make engines with device="cuda", or that of another kind.

    strict: the host may not wait but for an event. num_waits counts those that it waited for,
    num_crossings the copies between host and GPU. graphs: all that were captured.
    """

    def __init__(self, kind: str = "cuda", first: VirtualGpu | None = None) -> None:
        """first: the first GPU of the machine, if this is another."""
        super().__init__()
        self._first = first or self
        self._of_thread = first._of_thread if first else threading.local()
        self._interpreter = first._interpreter if first else threading.Lock()
        self.all: list[VirtualGpu] = first.all if first else []
        self.all.append(self)
        self.device = torch.device(kind, len(self.all) - 1)
        self.costs, self.memory_bytes, self.capability = Costs(), 1 << 30, (9, 0)
        self.strict = False
        self.is_stuck = threading.Event()  # the host has looked for work that does not end
        self.host_time, self.num_waits, self.num_crossings = 0.0, 0, 0
        self.streams: list[VirtualStream] = []
        self.current = VirtualStream(self)
        self.graphs: list[VirtualGraph] = []
        self._pools: dict[int, list[VirtualGraph]] = {}
        self._pool_numbers = count()
        self._capturing: VirtualGraph | None = None
        self._default_stream: VirtualStream | None = None
        self._storages: dict[int, list[int]] = {}  # data pointer -> [tensors, bytes]
        self.allocated = self.peak = 0
        self._patch = pytest.MonkeyPatch()

    # -- torch.cuda, or torch.accelerator
    # -----------------------------------------------------------------------------------------

    def another(self) -> VirtualGpu:
        """One more GPU of this machine, for a thread to enter while this one is entered."""
        return VirtualGpu(self.device.type, self._first)

    def __enter__(self) -> VirtualGpu:
        self._of_thread.gpu = self
        if self is self._first:
            self._replace_names()
        super().__enter__()
        return self

    def _here(self) -> VirtualGpu:
        """The GPU of the calling thread."""
        here: VirtualGpu = getattr(self._of_thread, "gpu", self)
        return here

    def _names(self) -> list[tuple[Any, dict[str, Any]]]:
        return self._cuda_names() if self.device.type == "cuda" else self._accelerator_names()

    def _replace_names(self) -> None:
        for number, (module, names) in enumerate(self._names()):
            for name, replacement in names.items():

                def here(*args: Any, _at: tuple[int, str] = (number, name), **kwargs: Any) -> Any:
                    return self._here()._names()[_at[0]][1][_at[1]](*args, **kwargs)

                is_class = isinstance(replacement, type)
                self._patch.setattr(module, name, replacement if is_class else here)
        launch = GridExecutor.__call__
        self._patch.setattr(
            GridExecutor,
            "__call__",
            lambda kernel, *a, **k: self._here()._launch(launch, kernel, a, k),
        )
        clock = SimpleNamespace(
            monotonic=time.monotonic, sleep=lambda seconds: self._here().sleep(seconds)
        )
        self._patch.setattr(gpu_module, "time", clock)
        generator = torch.Generator
        self._patch.setattr(torch, "Generator", lambda *_: generator())
        gpu = self

        def empty_host(_: GpuDevice, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return gpu._pin(torch.empty(shape, dtype=dtype))  # on a thread, where no mode is on

        self._patch.setattr(GpuDevice, "empty_host", empty_host)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.undo()

    def _shared_names(self) -> dict[str, Any]:
        """What torch.cuda and torch.accelerator call alike."""
        return {
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": self._forget_peak,
            "current_stream": lambda *_: self.current,
            "synchronize": lambda *_: self.wait_until(max(s.time for s in self.streams)),
            "memory_allocated": lambda *_: self.allocated,
            "max_memory_allocated": lambda *_: self.peak,
        }

    def _memory(self, *_: object) -> tuple[int, int]:
        return self.memory_bytes - self.allocated, self.memory_bytes

    def _cuda_names(self) -> list[tuple[Any, dict[str, Any]]]:
        others = {
            "is_available": lambda: True,
            "device_count": lambda: len(self.all),
            "set_device": self._set_device,
            "is_bf16_supported": lambda **_: True,
            "current_device": lambda: self.device.index,
            "mem_get_info": self._memory,
            "get_device_properties": lambda *_: SimpleNamespace(
                shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10
            ),
            "get_device_capability": lambda *_: self.capability,
            "_sleep": lambda cycles: self.current.work(cycles / CYCLES_PER_S),
            "Stream": lambda *_: VirtualStream(self),
            "stream": lambda stream: stream,
            "graph_pool_handle": lambda: next(self._pool_numbers),
            "CUDAGraph": VirtualGraph,
            "graph": self._capture,
        }
        return [(torch.cuda, self._shared_names() | others)]

    def _accelerator_names(self) -> list[tuple[Any, dict[str, Any]]]:
        others = {
            "current_accelerator": lambda check_available=False: torch.device(self.device.type),
            "device_count": lambda: 1,
            "current_device_index": lambda: 0,
            "set_device_index": lambda _: None,
            "get_memory_info": self._memory,
            "get_device_capability": lambda _: {"supported_dtypes": {torch.bfloat16}},
        }
        graphs = {
            "graph_pool_handle": lambda: next(self._pool_numbers),
            "XPUGraph": VirtualGraph,
            "Stream": lambda *_: VirtualStream(self),
            # It takes no error mode.
            "graph": lambda graph, pool, stream: self._capture(graph, pool, stream),
        }
        return [
            (torch.accelerator, self._shared_names() | others),
            (torch, {"Stream": lambda _: VirtualStream(self)}),
            (torch.xpu, graphs),
        ]

    def _set_device(self, device: torch.device) -> None:
        assert device == self.device, f"a thread of {self.device} asks for {device}"

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Back on a CPU for a while."""
        self.__exit__(None, None, None)
        yield
        self.__enter__()

    def _forget_peak(self, _: object) -> None:
        self.peak = self.allocated

    @contextlib.contextmanager
    def _capture(
        self,
        graph: VirtualGraph,
        pool: int | None = None,
        stream: VirtualStream | None = None,
        **_: object,
    ) -> Iterator[None]:
        """Without a stream torch takes one for all graphs, made on the GPU of the first."""
        first = self._first
        first._default_stream = first._default_stream or VirtualStream(self)
        if (stream or first._default_stream).gpu is not self:
            raise WrongPlaceError("a graph is captured on a stream of another GPU")
        self.graphs.append(graph)
        sharing = [] if pool is None else self._pools.setdefault(pool, [])
        for earlier in sharing:
            earlier.later.append(graph)
        sharing.append(graph)
        self._capturing = graph
        yield
        self._capturing = None

    @property
    def is_capturing(self) -> bool:
        """Whether work is put into a graph."""
        return self._capturing is not None

    def wait_until(self, time: float) -> None:
        """The host waits for the GPU."""
        assert self._capturing is None, "the host waits while a graph is captured"
        self.num_waits += 1
        self.host_time = max(self.host_time, time)

    def sleep(self, seconds: float) -> None:
        """The host sleeps while it looks at events: until the next stream has done its work. A
        stream may never have: then real time passes.
        """
        assert self._capturing is None, "the host waits while a graph is captured"
        ends = [s.time for s in self.streams if self.host_time < s.time < float("inf")]
        if ends:
            self.host_time = min(ends)
        else:
            self.is_stuck.set()
            time.sleep(seconds)

    # -- kernels and operators
    # -----------------------------------------------------------------------------------------

    def _launch(self, launch: Callable[..., None], kernel: Any, args: Any, kwargs: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        num_bytes = 0  # over the link
        for tensor in _tensors(args):
            if not self._is_here(tensor):
                if not (_is_pinned(tensor) and "READ" in named):
                    raise WrongPlaceError(f"{kernel.fn.__name__} is given a tensor of the host")
                num_bytes = named["num_tokens"] * named["READ"]
                self.num_crossings += 1

        def run() -> None:
            with torch._C.DisableTorchFunction():
                blocks = named.get("num_blocks")
                folded = int(blocks.sum()) if blocks is not None else 0
                with self._interpreter:
                    launch(kernel, *args, **kwargs)
            seconds = folded * self.costs.block_s if folded else self.costs.operation_s
            self.current.work(max(seconds, num_bytes / self.costs.link_bytes_per_s))

        self._queue(run)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == GET_DEVICE:
            return self.device if self._is_here(args[0]) else func(*args)
        if func == GET_IS_CUDA:
            return self.device.type == "cuda" and self._is_here(args[0])
        if func is torch.device:
            return func(*args, **kwargs)
        name = func.__name__
        if name == "_scaled_dot_product_efficient_attention":
            func = _sdpa
        if name == "pin_memory":
            return self._pin(args[0].clone())
        is_pinned = kwargs.pop("pin_memory", False)
        args, kwargs, target = _to_cpu(args, kwargs)
        given = list(_tensors((args, kwargs)))
        here = [tensor for tensor in given if self._is_here(tensor)]
        if len(self.all) > 1 and any(getattr(t, "gpu", self) is not self for t in given):
            raise WrongPlaceError(f"{name}: tensors of another GPU")
        if name == "to" and target is not None:
            return self._move(args[0], target, func(*args, **kwargs))
        if here:
            self._check(name, args, given, here)
        is_ours = bool(here) or (target is not None and target.type != "cpu")
        if self.strict and is_ours and name in ("tensor", "as_tensor") and not here:
            raise HostWaitError("a tensor on the GPU from numbers of the host")
        if not is_ours:
            out = func(*args, **kwargs)
            if is_pinned or any(_is_pinned(t) and _shares(t, out) for t in given):
                self._pin(out)
            return out
        if name in TRANSFERS and len(here) < len(given):
            return self._transfer(func, args, kwargs)
        if name in MAKES_ROOM and target is not None and target.type == "cpu":
            return func(*args, **kwargs)
        return self._compute(func, name, args, kwargs, given)

    def _check(
        self, name: str, args: tuple[Any, ...], given: list[Tensor], here: list[Tensor]
    ) -> None:
        """Raise where this operator cannot run on a GPU, or only if the host waits."""
        if self.strict and (name in READS or _picks_by_mask(name, args)):
            raise HostWaitError(f"{name} of a tensor on the GPU")
        elsewhere = [t for t in given if t.dim() and not self._is_here(t)]
        if elsewhere and name not in TRANSFERS:
            raise WrongPlaceError(f"{name}: tensors of the host and of the GPU")

    def _move(self, source: Tensor, target: torch.device, out: Tensor) -> Tensor:
        if target.type != "cpu":
            if self._is_here(source):
                return self._place(out)
            self._cross(source)
            with torch._C.DisableTorchFunction():
                return self._place(out.clone())
        if self._is_here(source):
            if self.strict:
                raise HostWaitError("to(cpu) of a tensor on the GPU")
            with torch._C.DisableTorchFunction():
                return out.clone()
        return out

    def _transfer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in _tensors(args):
            if not self._is_here(tensor):
                self._cross(tensor)
        out = args[0]

        def run() -> None:
            with torch._C.DisableTorchFunction():
                func(*args, **kwargs)

        self._queue(run)
        return out

    def _cross(self, host: Tensor) -> None:
        """Count a copy of `host` over the link."""
        if self.strict and not _is_pinned(host) and host.dim():
            raise HostWaitError("a copy between the GPU and memory that is not pinned")
        self.num_crossings += 1
        self.current.work(host.nbytes / self.costs.link_bytes_per_s)

    def _compute(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> Any:
        changes = (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        changes |= name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
        if self._capturing is not None and changes and name not in MAKES_ROOM:

            def again() -> None:
                with torch._C.DisableTorchFunction():
                    func(*args, **kwargs)
                self.current.work(self.costs.operation_s)

            self._queue(again)
            return kwargs.get("out", args[0])
        out = func(*args, **kwargs)
        made = list(_tensors(out))
        is_view = bool(made) and all(any(_shares(g, m) for g in given) for m in made)
        for tensor in made:
            self._place(tensor)
        if self._capturing is not None and not is_view:
            self._capturing.made += [tensor for tensor in made if tensor.is_floating_point()]
        if name in MAKES_ROOM or (is_view and not changes) or not made:
            return out
        self.current.work(0.0 if self._capturing else self.costs.operation_s)
        if self._capturing is not None:

            def anew() -> None:
                with torch._C.DisableTorchFunction():
                    for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                        old.copy_(new)
                self.current.work(self.costs.operation_s)

            self._capturing.work.append(anew)
        return out

    def _queue(self, work: Work) -> None:
        if self._capturing is not None:
            self._capturing.work.append(work)
        else:
            work()

    # -- which tensors are where
    # -----------------------------------------------------------------------------------------

    def _is_here(self, tensor: Tensor) -> bool:
        return getattr(tensor, "gpu", None) is self

    def _place(self, tensor: Tensor) -> Tensor:
        """It lies on the GPU from now on."""
        if self._is_here(tensor):
            return tensor
        tensor.gpu = self  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunction():
            pointer, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        held = self._storages.setdefault(pointer, [0, size])
        if not held[0]:
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        held[0] += 1
        weakref.finalize(tensor, self._free, pointer)
        return tensor

    def _free(self, pointer: int) -> None:
        held = self._storages[pointer]
        held[0] -= 1
        if not held[0]:
            self.allocated -= held[1]
            del self._storages[pointer]

    @staticmethod
    def _pin(tensor: Tensor) -> Tensor:
        for each in _tensors(tensor):
            each.is_pinned_here = True  # type: ignore[attr-defined]
        return tensor


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    with_lse: bool,
    dropout: float,
    causal: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, None, None]:
    """A GPU's operator by the CPU's: rows of the log-sum-exp are padded to multiples of 32."""
    assert bias is None and with_lse and not dropout
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale
    )
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.nan)
    padded[..., : lse.shape[2]] = lse
    return out, padded, None, None


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor, "is_pinned_here", False)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _shares(tensor: Tensor, out: Any) -> bool:
    with torch._C.DisableTorchFunction():
        pointer = tensor.untyped_storage().data_ptr()
        return any(pointer == each.untyped_storage().data_ptr() for each in _tensors(out))


def _to_cpu(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.device | None]:
    """The arguments with the CPU for every device, and the device that was named."""
    named: list[torch.device] = []

    def moved(value: Any) -> Any:
        if isinstance(value, str) and value.partition(":")[0] in ("cuda", "xpu", "cpu"):
            value = torch.device(value)
        if isinstance(value, torch.device):
            named.append(value)
            return torch.device("cpu")
        return value

    args = tuple(map(moved, args))
    kwargs = {name: moved(value) for name, value in kwargs.items()}
    return args, kwargs, named[-1] if named else None


def _picks_by_mask(name: str, args: tuple[Any, ...]) -> bool:
    """Whether it indexes by a mask: how much that is only the GPU knows."""
    if name not in ("__getitem__", "__setitem__"):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    is_masked = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)
    return is_masked and (name == "__getitem__" or isinstance(args[2], Tensor))
