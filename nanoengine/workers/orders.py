"""What rank 0 tells the other ranks to do; each of them then does the same over its own part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import IntEnum
from typing import Any

import torch

from nanoengine.config.model import RecurrentConfig, ShortConvConfig
from nanoengine.kv.kv_codec import make_codec
from nanoengine.kv.kv_spec import KVSpec
from nanoengine.workers.channel import FIRST_KIND


class Order(IntEnum):
    """Kinds of messages. Bodies: a StepRecord for START, DRAFT, STEP and HEAD_DRAFT, else JSON."""

    MEMORY = FIRST_KIND  # a KVSpec: make the KV memory; replied to
    START = FIRST_KIND + 1  # begin the transfers of the next step
    DRAFT = FIRST_KIND + 2  # run a step that drafts: over the device's KV alone
    STEP = FIRST_KIND + 3  # run a step; replied to with the copies that failed
    LOGITS = FIRST_KIND + 4  # the number of rows; their hidden states follow by broadcast
    KV = FIRST_KIND + 5  # the name of a method of KVMemory, and its arguments
    LINK_SPEED = FIRST_KIND + 6  # replied to with GB/s
    FREE = FIRST_KIND + 7  # before MEMORY; replied to with free and total bytes of the device
    PROFILE = FIRST_KIND + 8  # before MEMORY: the tokens of each sequence of a step to measure
    HEAD = FIRST_KIND + 9  # number of rows of the step, over which the MTP head runs
    HEAD_DRAFT = FIRST_KIND + 10  # a draft of the head; what is given to its rows follows
    HEAD_LOGITS = FIRST_KIND + 11  # as LOGITS, of the head


_RECURRENT = {kind.__name__: kind for kind in (RecurrentConfig, ShortConvConfig)}


def spec_to_json(spec: KVSpec) -> dict[str, Any]:
    """A KVSpec as JSON can hold it."""
    said = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return said | {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "recurrent": None if spec.recurrent is None else asdict(spec.recurrent),
        "recurrent_kind": type(spec.recurrent).__name__,
        "host_codec": spec.host_codec and spec.host_codec.name,
    }


def spec_from_json(said: Mapping[str, Any]) -> KVSpec:
    """The KVSpec of `spec_to_json`."""
    recurrent, kind = said["recurrent"], said["recurrent_kind"]
    if recurrent is not None:
        recurrent = _RECURRENT[kind](**{**recurrent, "layers": tuple(recurrent["layers"])})
    return KVSpec(
        **{
            **{key: value for key, value in said.items() if key != "recurrent_kind"},
            "dtype": getattr(torch, said["dtype"]),
            "recurrent": recurrent,
            "windows": tuple(said["windows"]),
            "heads": tuple(map(tuple, said["heads"])),
            "sources": tuple(said["sources"]),
            "host_codec": make_codec(said["host_codec"]),
        }
    )
