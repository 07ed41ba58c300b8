"""All-reduce over hosts: results under any timing and any layout, and what crosses the network."""

from __future__ import annotations

import logging
import os
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.transport import shared_lanes
from hvdlite.transport.auto import AllreduceLimits, AutoTransport, make_transport
from hvdlite.transport.hierarchical import HierarchicalTransport
from hvdlite.transport.ring import RingTransport
from hvdlite.transport.shared_memory import SharedMemoryTransport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, drive, random_scheduler, scripted_scheduler
from .test_transports import KINDS, operations, to_storage

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous files"
)

LAYOUTS = ["aabb", "abab", "aab", "abb", "aaab", "abbcc", "aabbcc", "aaabcc", "abcabc", "aaaabbbb"]
"""The host of each rank, a letter each."""


@pytest.fixture(params=[True, False], ids=["counting", "barriers"])
def how_ranks_meet(request, monkeypatch):
    monkeypatch.setattr(shared_lanes, "STORES_IN_ORDER", request.param)


class Counted:
    """A communicator that counts the bytes that leave this rank's host."""

    def __init__(self, comm, hosts):
        self._comm = comm
        self._hosts = hosts
        self.children = []
        self.crossed = 0

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, data, dest, tag):
        if self._hosts[dest] != self._hosts[self._comm.rank]:
            self.crossed += data.nbytes
        return self._comm.isend(data, dest, tag)

    def subset(self, ranks):
        made = self._comm.subset(ranks)
        if made is None:
            return None
        self.children.append(Counted(made, [self._hosts[rank] for rank in ranks]))
        return self.children[-1]

    def all_crossed(self):
        return self.crossed + sum(child.all_crossed() for child in self.children)


def make(layout, scheduler=None, chunk_bytes=160, segment_bytes=32):
    world = FakeWorld(len(layout), scheduler)
    comms = [Counted(comm, layout) for comm in world.communicators]
    creations = [
        [
            HierarchicalTransport.creating(
                comm,
                layout,
                RingTransport(comm, 32, 2),
                segment_bytes,
                chunk_bytes=chunk_bytes,
                capacity=2**20,
            )
        ]
        for comm in comms
    ]
    return world, comms, [made for (made,) in drive(world, creations)]


def reduced(layout, contributions, dtype, op, seed, resident=False, chunk_bytes=160):
    world, comms, transports = make(layout, random_scheduler(seed), chunk_bytes)
    buffers = []
    for transport, contribution in zip(transports, contributions, strict=True):
        buffer = np.empty_like(contribution)
        if resident:
            buffer = transport.allocate(contribution.nbytes).view(contribution.dtype)
        buffer[...] = contribution
        buffers.append(buffer)
    drive(
        world,
        [
            [transport.allreduce(buffer, dtype, op, None, 0)]
            for transport, buffer in zip(transports, buffers, strict=True)
        ],
        random.Random(seed),
    )
    world.check_quiet()
    return buffers, comms


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_operations_at_once(data):
    layout = data.draw(st.sampled_from(LAYOUTS), "hosts")
    kinds = data.draw(st.sampled_from([("allreduce",), tuple(KINDS)]))
    drawn = data.draw(operations(len(layout), kinds))
    script = data.draw(st.lists(st.booleans(), max_size=40), "schedule")
    order = data.draw(st.one_of(st.none(), st.integers(0, 1000)), "order")
    world, _, transports = make(layout, scripted_scheduler(script))
    drive(
        world,
        [
            [start(transports[rank], rank, tag) for tag, (start, _) in enumerate(drawn)]
            for rank in range(len(layout))
        ],
        None if order is None else random.Random(order),
    )
    for _, check in drawn:
        check()
    world.check_quiet()
    for transport in transports:
        transport.close()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("resident", [False, True], ids=["ordinary", "resident"])
def test_more_operations_than_lanes(layout, resident, how_ranks_meet):
    # Whoever waits for a lane must not keep others from theirs, on whichever host.
    world, _, transports = make(layout, random_scheduler(len(layout)))
    size, lengths = len(layout), [300, 1, 77, 40, 500]
    buffers = [
        [
            transport.allocate(4 * n).view(np.int32) if resident else np.empty(n, np.int32)
            for n in lengths
        ]
        for transport in transports
    ]
    for rank in range(size):
        for buffer in buffers[rank]:
            buffer[...] = np.arange(len(buffer)) + rank
    drive(
        world,
        [
            [
                transports[rank].allreduce(buffer, DType.INT32, ReduceOp.SUM, None, tag)
                for tag, buffer in enumerate(buffers[rank])
            ]
            for rank in range(size)
        ],
        random.Random(7),
    )
    for of_rank in buffers:
        for buffer in of_rank:
            expected = np.arange(len(buffer)) * size + size * (size - 1) // 2
            np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32], ids=str)
def test_all_ranks_get_the_same_bits_at_any_timing(layout, dtype):
    source = np.random.default_rng(1)
    contributions = [to_storage(source.normal(size=301), dtype) for _ in layout]
    first = reduced(layout, contributions, dtype, ReduceOp.SUM, 0)[0][0]
    wide = [(to_float(values, dtype)) for values in contributions]
    np.testing.assert_allclose(to_float(first, dtype), sum(wide), atol=0.15)
    for seed in range(3):
        for resident in (False, True):
            for buffer in reduced(layout, contributions, dtype, ReduceOp.SUM, seed, resident)[0]:
                np.testing.assert_array_equal(buffer.view(np.uint8), first.view(np.uint8))


def to_float(values, dtype):
    if dtype is DType.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 5, 59, 60, 61, 1000])
def test_the_network_carries_as_little_as_can_be(layout, length):
    contributions = [np.full(length, rank, np.float32) for rank in range(len(layout))]
    hosts = sorted(set(layout))
    _, comms = reduced(layout, contributions, DType.FLOAT32, ReduceOp.SUM, 0, chunk_bytes=4000)
    total = sum(comm.all_crossed() for comm in comms)
    # 2(h-1)/h of the buffer for each of h hosts (Patarasuk and Yuan, 2009).
    assert total == 2 * (len(hosts) - 1) * 4 * length
    for host in hosts:
        sent = [c.all_crossed() for c, where in zip(comms, layout, strict=True) if where == host]
        slices = min(map(layout.count, hosts))
        # Every slice of every ring is uneven by an element at most.
        share = 2 * (len(hosts) - 1) * 4 * length / len(hosts) / slices
        assert all(abs(each - share) <= 2 * 4 * len(hosts) for each in sent[:slices])
        assert not any(sent[slices:])


@pytest.mark.parametrize("layout", ["aabb", "aaab"])
def test_finish_sees_each_element_once(layout):
    world, _, transports = make(layout)
    seen = [[] for _ in layout]
    buffers = [np.arange(100, dtype=np.float32) for _ in layout]
    drive(
        world,
        [
            [
                transports[rank].allreduce(
                    buffers[rank], DType.FLOAT32, ReduceOp.SUM, seen[rank].extend, 0
                )
            ]
            for rank in range(len(layout))
        ],
    )
    everything = sorted(float(value) for values in seen for value in values)
    assert everything == [4.0 * i for i in range(100)]


def test_chunks_are_reduced_while_the_network_carries_others():
    _, comms, transports = make("aabb", chunk_bytes=64)
    operations_ = [
        transport.allreduce(np.ones(200, np.float32), DType.FLOAT32, ReduceOp.SUM, None, 0)
        for transport in transports[:2]
    ]
    # The other host has not begun: nothing can come back from there.
    started = [next(operation) for operation in operations_]
    for _ in range(200):
        for i, operation in enumerate(operations_):
            if started[i].Test():
                started[i] = next(operation)
    # Four chunks, of which the first ones are smaller. A rank's slice is half of a chunk, and half
    # of its slice is what it may send before it has to receive.
    sent = (16 + 32 + 64 + 64) // 2 // 2
    assert [comm.all_crossed() for comm in comms[:2]] == [sent] * 2


@pytest.mark.parametrize("seed", range(5))
def test_a_host_without_shared_memory_is_known_to_all(seed, monkeypatch):
    from hvdlite.transport import shared_segment

    world = FakeWorld(5, random_scheduler(seed))
    opened = shared_segment._open

    def refuse(pid, descriptor, size, token):
        if size >= 2**24:  # the second host's, see below
            raise OSError("no room")
        return opened(pid, descriptor, size, token)

    monkeypatch.setattr(shared_segment, "_open", refuse)

    def attempt(comm):
        ring = RingTransport(comm)
        try:
            capacity = 2**20 if comm.rank < 2 else 2**24
            yield from HierarchicalTransport.creating(comm, "aabbc", ring, 32, capacity=capacity)
        except shared_segment.SegmentUnavailableError as error:
            return str(error)

    results = drive(world, [[attempt(comm)] for comm in world.communicators])
    text = {text for (text,) in results}
    assert len(text) == 1
    assert "no room" in text.pop()
    assert all(all(group.freed) for group in world.groups if group.size < 5)


# -- the choice ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "transport", "kind"),
    [
        ("aabb", "auto", AutoTransport),
        ("aabb", "hierarchical", HierarchicalTransport),
        ("aab", "hierarchical", HierarchicalTransport),
        ("aaa", "hierarchical", SharedMemoryTransport),
        ("abc", "hierarchical", AutoTransport),
        ("aabb", "ring", RingTransport),
    ],
)
def test_the_choice_follows_from_the_hosts(hosts, transport, kind, caplog):
    # make_transport blocks, so every rank needs a thread.
    world = FakeWorld(len(hosts))
    chosen = SimpleNamespace(
        transport=transport, segment_bytes=64, small_bytes=64, peer_memory=True
    )
    made = [None] * len(hosts)

    def choose(rank):
        made[rank] = make_transport(world.communicators[rank], chosen, hosts=list(hosts))

    threads = [
        threading.Thread(target=choose, args=(rank,), daemon=True) for rank in range(len(hosts))
    ]
    with caplog.at_level(logging.WARNING):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert [type(each) for each in made] == [kind] * len(hosts)
    large = getattr(made[0], "_large", made[0])
    expected = HierarchicalTransport if kind is AutoTransport and hosts == "aabb" else None
    assert expected is None or type(large) is expected
    assert not caplog.records


def test_small_bytes_raises_the_limits_and_never_lowers_them():
    limits = AllreduceLimits(10, 20, 30)
    assert limits.at_least(20) == AllreduceLimits(20, 20, 30)
    assert limits.at_least(0) == limits
