"""AcceleratorDevice where it is not: what it says is missing. What it does where it is,
test_virtual_gpu.py has.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nanoengine.devices.accelerator import AcceleratorDevice
from nanoengine.devices.gpu import find_graphs
from nanoengine.devices.select import make_device
from nanoengine.errors import ConfigError


def offer(patch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> None:
    """A PyTorch that sees so many accelerators of a kind."""
    found = None if kind is None else torch.device(kind)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    patch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        (None, "xpu", 'sees no accelerator; use device="cpu", or install PyTorch for'),
        ("cuda", "xpu:1", "device='xpu:1' was asked for, but this PyTorch sees only 'cuda'"),
        ("xpu", "xpu:2", "the last of 2 is xpu:1"),
        ("xpu", "xpux", 'device must be "auto", "cpu", "cuda", "xpu" or "npu"'),
    ],
)
def test_what_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, name: str, text: str
) -> None:
    offer(monkeypatch, kind)
    with pytest.raises(ConfigError, match=text):
        make_device(name, None)


def test_an_npu_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(ConfigError, match="device='npu' needs the package torch_npu, which brings"):
        make_device("npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    offer(monkeypatch, None)
    with pytest.raises(ConfigError, match="install PyTorch for Ascend and its driver"):
        make_device("npu", None)


def test_delays_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "xpu")
    with pytest.raises(ConfigError, match="debug_copy_delay_ms is not supported on 'xpu'"):
        make_device("xpu:1", None, max_delay_s=0.1)


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_the_second_one_and_its_dtype(monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool) -> None:
    """Streams and memory are those of the device that was named."""
    offer(monkeypatch, "xpu")
    asked: list[Any] = []

    def note(answer: Any) -> Any:
        return lambda device: asked.append(device) or answer

    known = {torch.float16, torch.bfloat16} if has_bfloat16 else {torch.float16}
    monkeypatch.setattr(torch.accelerator, "set_device_index", note(None))
    monkeypatch.setattr(torch.accelerator, "current_stream", note(SimpleNamespace()))
    monkeypatch.setattr(torch, "Stream", note(SimpleNamespace()))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", note((3, 4)))
    released: list[int] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: released.append(1))
    capability = {"supported_dtypes": known}
    monkeypatch.setattr(torch.accelerator, "get_device_capability", note(capability))
    device = make_device("xpu:1", None)
    assert isinstance(device, AcceleratorDevice) and device.name == "xpu:1"
    assert device.memory() == (3, 4) and released  # what was freed is free
    assert device.auto_dtype()[0] is (torch.bfloat16 if has_bfloat16 else torch.float16)
    device.begin_step()
    assert asked == [torch.device("xpu", 1)] * 7


def test_graphs_are_those_of_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its own name, with the options that it takes; none where there are none."""
    asked: list[Any] = []
    vendor = SimpleNamespace(
        graph_pool_handle=lambda: "pool",
        graph=lambda graph, **options: asked.append((graph, options)),
        Stream=lambda device: f"a stream of {device}",
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: vendor)
    assert find_graphs(torch.device("xpu")) is None
    for name, options in (("XPUGraph", {}), ("NPUGraph", {"capture_error_mode": "thread_local"})):
        monkeypatch.setattr(vendor, name, lambda name=name: name, raising=False)
        found = find_graphs(torch.device("xpu"))
        assert found is not None and found.new_pool() == "pool"
        found.capture(found.new(), found.new_pool())
        own = {"pool": "pool", "stream": "a stream of xpu"}
        assert asked == [(name, own | options)]
        asked.clear()
        monkeypatch.delattr(vendor, name)
