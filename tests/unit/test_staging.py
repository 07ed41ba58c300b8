"""Transports load and store every element once, wherever they find the time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hvdlite.transport.base import Staging
from hvdlite.transport.hierarchical import HierarchicalTransport
from hvdlite.transport.ring import RingTransport
from hvdlite.transport.shared_memory import SharedMemoryTransport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, drive, random_scheduler
from .test_transports import MAKERS, double


def hierarchical(world):
    layout = "aabb"[: len(world.communicators)]
    return [
        HierarchicalTransport.creating(
            comm, layout, RingTransport(comm, 32, 2), 32, chunk_bytes=160, capacity=2**20
        )
        for comm in world.communicators
    ]


def shared_memory(world):
    return [SharedMemoryTransport.creating(c, 64, capacity=2**20) for c in world.communicators]


def made(name, world):
    creating = {"hierarchical": hierarchical, "shared memory": shared_memory}.get(name)
    if creating is None:
        return [MAKERS[name](comm) for comm in world.communicators]
    return [result for (result,) in drive(world, [[each] for each in creating(world)])]


CASES = [(name, size) for name in MAKERS for size in (1, 2, 3, 4)]
CASES += [(name, size) for name in ("hierarchical", "shared memory") for size in (2, 3, 4)]


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize("length", [1, 10, 500])
@pytest.mark.parametrize("seed", range(3))
def test_every_element_is_loaded_and_stored_once(name, size, length, seed):
    world = FakeWorld(size, random_scheduler(seed))
    transports = made(name, world)
    sources = np.random.default_rng(seed).integers(-9, 9, (size, length)).astype(np.float64)
    buffers = [np.full(length, np.nan, np.float32) for _ in range(size)]
    targets = np.zeros((size, length))
    loads, stores = np.zeros((2, size, length), int)

    def staging(rank):
        def load(start, stop):
            assert np.isnan(buffers[rank][start:stop]).all()
            buffers[rank][start:stop] = sources[rank, start:stop]
            loads[rank, start:stop] += 1

        def store(start, stop):
            targets[rank, start:stop] = buffers[rank][start:stop]
            stores[rank, start:stop] += 1

        return Staging(load, store if rank % 2 == 0 else None)

    # What a rank does is its own business: the last one has its buffer filled.
    stagings = [staging(rank) for rank in range(size)]
    if size > 1:
        stagings[-1] = None
        buffers[-1][...] = sources[-1]
    drive(
        world,
        [
            [
                transport.allreduce(
                    buffer,
                    DType.FLOAT32,
                    ReduceOp.SUM,
                    double(DType.FLOAT32),
                    0,
                    staging=staging_,
                )
            ]
            for transport, buffer, staging_ in zip(transports, buffers, stagings, strict=True)
        ],
        random.Random(seed),
    )
    for rank in range(size):
        np.testing.assert_array_equal(buffers[rank], 2 * sources.sum(0))
        if stagings[rank] is not None:
            assert (loads[rank] == 1).all()
            if stagings[rank].store is not None:
                assert (stores[rank] == 1).all()
                np.testing.assert_array_equal(targets[rank], buffers[rank])
