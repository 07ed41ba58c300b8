"""How many messages and bytes a rank sends on up to 256 ranks, counted, and what a model says.

The negotiation and the transports are the real ones; their communicators are in memory, all ranks
in one process. docs/scaling.md is about the result.

python -m benchmarks.simulation [--ranks 4 16 64 256]
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.engine.negotiation import Negotiator
from hvdlite.engine.requests import Kind, Request
from hvdlite.engine.submissions import Entry
from hvdlite.transport.hierarchical import CHUNK_BYTES, HierarchicalTransport
from hvdlite.transport.ring import RingTransport
from hvdlite.transport.types import DType, ReduceOp
from tests.unit.fake_mpi import FakeWorld, drive

__all__ = [
    "Counted",
    "allreduce",
    "model_allreduce_bytes",
    "model_allreduce_messages",
    "model_round_bytes",
    "negotiation",
]


class Counted:
    """A communicator that counts what its rank does, by kind."""

    def __init__(self, comm: Any, hosts: Sequence[int], counts: Counter[str]) -> None:
        self._comm = comm
        self._hosts = hosts
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def isend(self, data: np.ndarray, dest: int, tag: int) -> Any:
        away = self._hosts[dest] != self._hosts[self._comm.rank]
        for what, amount in (("messages", 1), ("bytes", data.nbytes)):
            self.counts[what] += amount
            self.counts[f"{what} to other hosts"] += amount * away
        return self._comm.isend(data, dest, tag)

    def iband(self, words: np.ndarray) -> Any:
        self.counts["rounds"] += 1
        self.counts["bytes of rounds"] += words.nbytes
        return self._comm.iband(words)

    def subset(self, ranks: Sequence[int]) -> Counted | None:
        made = self._comm.subset(ranks)
        if made is None:
            return None
        return Counted(made, [self._hosts[rank] for rank in ranks], self.counts)


# -- counted ------------------------------------------------------------------------------


def negotiation(size: int, tensors: int, steps: int = 3) -> list[list[Counter[str]]]:
    """Negotiate so many named tensors a step, all of which are ready when the round begins.

    Returns:
        For each step, what each rank has done.
    """
    world = FakeWorld(size)
    counts: list[Counter[str]] = [Counter() for _ in range(size)]
    apart = list(range(size))
    negotiators = [
        Negotiator(Counted(comm, apart, counts[comm.rank]), 1024, range(size))  # type: ignore[arg-type]
        for comm in world.communicators
    ]
    request = Request(Kind.ALLREDUCE, (DType.FLOAT32,), ((256, 128, 3, 3),), ReduceOp.AVERAGE)
    history = []
    for _ in range(steps):
        for count in counts:
            count.clear()
        for negotiator in negotiators:
            for i in range(tensors):
                name = f"layer{i}.weight"
                negotiator.add(Entry(request, [], [], None, 0.0, name))  # type: ignore[arg-type]
        rounds = drive(world, [[negotiator.round()] for negotiator in negotiators])
        for (outcome,) in rounds:
            assert len(outcome.agreed) == tensors
        history.append([Counter(count) for count in counts])
    world.check_quiet()
    return history


def allreduce(
    size: int, ranks_per_host: int, length: int, segment_bytes: int, hierarchical: bool
) -> list[Counter[str]]:
    """All-reduce so many float32 and return what each rank has sent."""
    world = FakeWorld(size)
    hosts = [rank // ranks_per_host for rank in range(size)]
    counts: list[Counter[str]] = [Counter() for _ in range(size)]
    comms: list[Any] = [Counted(comm, hosts, counts[comm.rank]) for comm in world.communicators]
    transports: list[Any] = [RingTransport(comm, segment_bytes) for comm in comms]
    if hierarchical:
        creations = [
            [HierarchicalTransport.creating(comm, hosts, ring, segment_bytes, capacity=2**16)]
            for comm, ring in zip(comms, transports, strict=True)
        ]
        transports = [made for (made,) in drive(world, creations)]
    for count in counts:
        count.clear()
    buffers = [np.full(length, rank, np.float32) for rank in range(size)]
    drive(
        world,
        [
            [transport.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
            for transport, buffer in zip(transports, buffers, strict=True)
        ],
    )
    for buffer in buffers:
        assert (buffer == size * (size - 1) / 2).all()
    return counts


# -- modelled -----------------------------------------------------------------------------


def model_round_bytes(cached: int, window: int = 16) -> int:
    """Return the bytes that a round combines: flags, the window of unnamed requests, the cache."""
    window_words = 1 + math.ceil(window / 64) + 2 * window
    return 8 * (window_words + 2 * math.ceil(cached / 64))


def model_allreduce_bytes(hosts: int, slices: int, nbytes: int) -> float:
    """Return the bytes that a rank sends to another host; a plain ring has one slice."""
    return 2 * (hosts - 1) / hosts * nbytes / slices


def model_allreduce_messages(hosts: int, slices: int, nbytes: int, segment_bytes: int) -> int:
    """Return the messages of a rank: so many steps, each of one piece in segments."""
    return 2 * (hosts - 1) * math.ceil(nbytes / slices / hosts / segment_bytes)


ALPHA = 50e-6
"""Seconds of a step of a ring, with the Python around it."""
BETA = 25e9 / 8 * 0.95
"""Bytes per second of a host's link, 25 Gbit/s."""
MEMORY = 5e9
"""Bytes per second at which a host's ranks sum and gather a buffer in shared memory, together."""


def model_seconds(hosts: int, each: int, nbytes: int, hierarchical: bool) -> float:
    """Return how long an all-reduce takes if nothing but its steps and its bytes do."""
    # All but one chunk is summed while the network carries others.
    inside = min(nbytes, CHUNK_BYTES) / MEMORY if hierarchical else 0.0
    count = hosts if hierarchical else hosts * each
    return 2 * (count - 1) * ALPHA + 2 * (count - 1) / count * nbytes / BETA + inside


def print_model(each: int = 8) -> None:
    """Print what the model says up to 1,024 ranks."""
    sizes = (4 * 2**20, 64 * 2**20)
    print("\n| ranks | round, ms | news at rank 0, MB |", end="")
    for nbytes in sizes:
        print(f" {nbytes >> 20} MiB, ring, ms | hierarchical, ms |", end="")
    print("\n" + "|---" * (3 + 2 * len(sizes)) + "|")
    for size in (16, 64, 256, 1024):
        cells = [f"{size}", f"{math.log2(size) * ALPHA * 1e3:.2f}"]
        cells.append(f"{(size - 1) * (11179 + 11664) / 1e6:.1f}")
        for nbytes in sizes:
            for hierarchical in (False, True):
                seconds = model_seconds(size // each, each, nbytes, hierarchical)
                cells.append(f"{seconds * 1e3:.1f}")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    """Print the tables of docs/scaling.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--tensors", type=int, default=161)
    arguments = parser.parse_args()
    print("| ranks | a round, bytes | the first: rank 0 receives | and sends | others send |")
    print("|---|---|---|---|---|")
    for size in arguments.ranks:
        first, _, last = negotiation(size, arguments.tensors)
        assert all(count["rounds"] == 1 and not count["messages"] for count in last)
        received = sum(count["bytes"] for count in first[1:])
        print(
            f"| {size} | {last[0]['bytes of rounds']} | {size - 1} x {first[1]['bytes']} "
            f"= {received} | {size - 1} x {first[0]['bytes'] // (size - 1)} "
            f"= {first[0]['bytes']} | {first[1]['messages']} message |"
        )
    print("\n| ranks | hosts | transport | messages | bytes to other hosts, a host | model |")
    print("|---|---|---|---|---|---|")
    length, segment = 2**16, 2048
    for size in arguments.ranks:
        each = min(8, size // 2)
        for name, hierarchical in (("ring", False), ("hierarchical", True)):
            counts = allreduce(size, each, length, segment, hierarchical)
            hosts, slices = (size // each, each) if hierarchical else (size, 1)
            away = sum(count["bytes to other hosts"] for count in counts[:each])
            model = model_allreduce_bytes(hosts, slices, 4 * length) * slices
            messages = model_allreduce_messages(hosts, slices, 4 * length, segment)
            print(
                f"| {size} | {size // each} | {name} | {counts[0]['messages']} ({messages}) "
                f"| {away} | {model:.0f} |"
            )
    print_model()


if __name__ == "__main__":
    main()
