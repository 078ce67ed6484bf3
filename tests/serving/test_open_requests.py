"""OpenRequests: room is given back, streams are closed, and an end reaches all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from virtual_time import run

from nanoengine.serving.open_requests import OpenRequests
from nanoengine.serving.refusals import Refusal


class Stream:
    """What OpenRequests sees of an AsyncDeltaStream."""

    def __init__(self, is_queued: bool = True) -> None:
        self.is_queued = is_queued
        self.error: Any = None
        self.is_closed = False

    def fail(self, error: Exception) -> None:
        self.error = error

    def close(self) -> None:
        self.is_closed = True


def test_room_is_given_back_also_after_an_error() -> None:
    requests = OpenRequests(3, 0)
    with requests.room_for(2):
        text = "generated or wait: 2; with 2 more they would be above 3"
        with pytest.raises(Refusal, match=text) as caught, requests.room_for(2):
            pass
        assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
        with pytest.raises(KeyError), requests.room_for(1):
            assert requests.num_texts == 3
            raise KeyError
    assert requests.num_texts == 0
    with pytest.raises(Refusal) as caught, requests.room_for(4):
        pass
    assert caught.value.status == 400


def test_a_stream_is_closed_however_it_ends() -> None:
    requests = OpenRequests(3, 0)
    stream = Stream()
    with pytest.raises(KeyError), requests.watched(stream):
        raise KeyError
    assert stream.is_closed
    requests.end_all("over")
    assert stream.error is None


def test_an_end_reaches_all_that_are_open_and_all_that_come() -> None:
    requests = OpenRequests(3, 0)
    stream, late = Stream(), Stream()
    with requests.watched(stream):
        requests.refuse_all("soon")
        assert stream.error is None
        requests.end_all("over")
        assert (stream.error.status, str(stream.error)) == (503, "over")
        with pytest.raises(Refusal, match="over"), requests.room_for(1):
            pass
        with pytest.raises(Refusal, match="over"), requests.watched(late):
            pass
    assert stream.is_closed and late.is_closed


@pytest.mark.parametrize("is_queued", [True, False])
def test_only_what_waits_in_the_queue_ends_by_its_time(is_queued: bool) -> None:
    async def work() -> Any:
        requests, stream = OpenRequests(3, 10), Stream(is_queued)
        with requests.watched(stream):
            await asyncio.sleep(9)
            assert stream.error is None
            await asyncio.sleep(2)
        return stream.error

    error = run(work())
    assert (error is not None) == is_queued
    if is_queued:
        assert error.body["error"]["code"] == "queue_timeout"
