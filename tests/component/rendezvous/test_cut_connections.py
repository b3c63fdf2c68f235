"""Every request under every fault of its connection: lost, cut at a byte, answered in vain, held back and repeated."""

from __future__ import annotations

import dataclasses
import random
import typing
from enum import Enum
from typing import Any

import pytest

from spark_elastic.protocol.events import Received
from spark_elastic.protocol.messages import DriverRequest
from spark_elastic.protocol.types import Fence, SlotId, WorkerId
from spark_elastic.rendezvous.messages import REQUESTS, GetValues, ListKeys, SetValues
from tests.component.rendezvous.cut_connections import CuttableNetwork, Way
from tests.component.rendezvous.driver_side import ATTEMPT, Driver, world

SAMPLED = 4  # bytes at which each way of each request is cut in a short run


def make_value(hint: Any) -> Any:
    """A value of a type hint, with something in everything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Fence:
        return Fence(ATTEMPT, 1)
    if hint in (SlotId, WorkerId):
        return hint("0-0" if hint is SlotId else "0-0.1")
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{field.name: make_value(hints[field.name]) for field in dataclasses.fields(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if origin is tuple:
        return (make_value(arguments[0]),)
    if type(None) in arguments:
        return make_value(arguments[0])
    if origin is dict:
        return {"loss": 0.5}
    return {str: "scope", int: 0, float: 1.0, bool: False, bytes: b"value"}[hint]


def ask_cut(
    driver: Driver, network: CuttableNetwork, request: DriverRequest[Any], way: Way, byte: int
) -> Any:
    """The answer to a request whose connection is cut."""
    with driver.client(address=network.address) as client:
        client.ask(ListKeys("scope"))  # so that what passes next is the request alone
        network.cut(way, byte)
        return client.ask(request)


@pytest.mark.parametrize("request_class", REQUESTS)
@pytest.mark.parametrize(
    "sampled", [SAMPLED, pytest.param(1 << 30, marks=pytest.mark.faults)], ids=["some bytes", "every byte"]
)
def test_a_request_that_is_cut_anywhere_is_answered_as_an_undisturbed_one(
    driver: Driver, network: CuttableNetwork, request_class: type[DriverRequest[Any]], sampled: int
) -> None:
    driver.server.publish(world(1, "0-0.1"))
    values = driver.server._state.values
    request = make_value(request_class)
    answer, lengths = ask_cut(driver, network, request, Way.REQUEST, 1 << 30), network.count()
    fresh = {"token": str} if hasattr(request, "token") else {}
    expected, stored = driver.events.qsize(), driver.call_in_loop(lambda: values.get("scope", ("scope",)))
    for way, length in lengths.items():
        bytes_ = range(1, length)
        for byte in random.Random(request_class.__name__).sample(bytes_, min(sampled, len(bytes_))):
            while not driver.events.empty():
                driver.events.get()
            again = dataclasses.replace(request, **{name: make(byte) for name, make in fresh.items()})
            if hasattr(request, "token"):
                again = dataclasses.replace(again, expected=stored[0], desired=f"{way} {byte}".encode())
            found = ask_cut(driver, network, again, way, byte)
            if hasattr(request, "token"):
                assert (found.changed, found.value) == (True, again.desired)
                stored = (again.desired,)
            else:
                assert found == answer, (way, byte)
            heard = [each.message for each in driver.events.queue if isinstance(each, Received)]
            assert all(each == (heard[0] if heard else None) for each in heard)
            assert len(heard) <= 1 + (way is Way.ANSWER)
            assert bool(heard) == bool(expected)


def test_a_held_back_request_changes_nothing_after_a_repeat(driver: Driver, network: CuttableNetwork) -> None:
    with driver.client(address=network.address) as client:
        client.ask(ListKeys("s"))
        network.hold()
        client.ask(SetValues("s", ("k",), (b"old",)), patience=0.2)
        client.ask(SetValues("s", ("k",), (b"new",)))
        network.release()
        assert client.ask(GetValues("s", ("k",))).values == (b"new",)
        driver.call_in_loop(lambda: None)
        assert client.ask(GetValues("s", ("k",))).values == (b"new",)
