"""What an allreduce costs by LogGP, from the messages that Gloo's ring and bcube send: nothing here is measured.

A message takes its sender and its receiver an `overhead` each, leaves at one byte per `gap` behind what left before,
arrives after the `latency`, and passes the receiver's link at one byte per `gap`, behind what came before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

SEGMENT = 1 << 20  # bytes, of Gloo's ring


@dataclass(frozen=True)
class Network:
    """The parameters, in seconds."""

    latency: float
    overhead: float
    gap: float  # per byte on the wire
    sum: float  # per byte that is added up


class Hosts:
    """The clock of each host, and when its link has carried what was sent and received."""

    def __init__(self, network: Network, count: int) -> None:
        self.times = [0.0] * count
        self._network = network
        self._out_free = [0.0] * count
        self._in_free = [0.0] * count

    def send(self, host: int, nbytes: float) -> float:
        """When the last byte has left."""
        self.times[host] += self._network.overhead
        self._out_free[host] = max(self.times[host], self._out_free[host]) + nbytes * self._network.gap
        return self._out_free[host]

    def receive(self, host: int, left: float, nbytes: float, added: bool) -> None:
        """The host waits for it, and adds it up."""
        network = self._network
        arrives = max(left + network.latency, self._in_free[host] + nbytes * network.gap)
        self._in_free[host] = arrives
        self.times[host] = max(self.times[host], arrives) + network.overhead + added * nbytes * network.sum


def predict_ring(network: Network, ranks: int, nbytes: int) -> float:
    """Segments go round, summed and then as they are; two are under way, as in Gloo's allreduce. All hosts do the same
    at the same time, so one is followed: what it has sent is what it receives."""
    segments = max(math.ceil(nbytes / SEGMENT), 2 * ranks)
    segments = math.ceil(segments / ranks) * ranks
    turns, segment, host = segments - segments // ranks, nbytes / segments, Hosts(network, 1)
    for added in (True, False):
        left: list[float] = []
        for turn in range(turns + 2):
            if turn >= 2:
                host.receive(0, left[turn - 2], segment, added)
            if turn < turns:
                left.append(host.send(0, segment))
    return host.times[0]


def predict_bcube(network: Network, ranks: int, nbytes: int) -> float:
    """Groups of hosts, one prime factor of their number after the other, divide a part among them; then back. In a
    group of more than two the first hosts get messages of several at once, as all send in the order of ranks."""
    steps, part, distance = [], float(nbytes), 1
    for group in find_factors(ranks):
        part /= group
        steps.append((group, distance, part))
        distance *= group
    hosts = Hosts(network, ranks)
    for order, added in ((steps, True), (steps[::-1], False)):
        for group, distance, piece in order:
            sent = []
            for rank in range(ranks):
                first = rank - rank // distance % group * distance
                peers = [first + place * distance for place in range(group)]
                sent += [(hosts.send(rank, piece), peer) for peer in peers if peer != rank]
            for left, peer in sorted(sent):
                hosts.receive(peer, left, piece, added)
    return max(hosts.times)


PREDICT: dict[str, Callable[[Network, int, int], float]] = {"ring": predict_ring, "bcube": predict_bcube}


def find_factors(number: int) -> list[int]:
    """Prime factors, the smallest first."""
    for factor in range(2, number + 1):
        if number % factor == 0:
            return [factor, *find_factors(number // factor)]
    return []


def fit(
    algorithm: str, points: Sequence[tuple[int, int, float]], start: Network, rounds: int = 60
) -> Network:
    """The network with whose latency, overhead and gap the logarithms of the times are nearest. points: ranks, bytes,
    seconds. start: where the search, one parameter after the other, begins; it has the cost of sums."""

    def error(network: Network) -> float:
        predict = PREDICT[algorithm]
        return sum(
            math.log(predict(network, ranks, nbytes) / seconds) ** 2 for ranks, nbytes, seconds in points
        )

    best, stretch = start, 2.0
    least = error(best)
    for _ in range(rounds):
        before = least
        for name in ("latency", "overhead", "gap"):
            for factor in (stretch, 1 / stretch):
                tried = replace(best, **{name: getattr(best, name) * factor})
                if (found := error(tried)) < least:
                    best, least = tried, found
        if least == before:
            stretch = math.sqrt(stretch)
    return best
