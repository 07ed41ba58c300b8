"""Several hosts, told apart by name only: the hierarchical transport gives the same results."""

from __future__ import annotations

import contextlib
import os
import zlib

import numpy as np
import pytest

from .expected import OPS, assert_equal, dtype_of, known, reduced
from .jobs import run_job

LAYOUTS = {2: ["ab"], 3: ["aab", "aba"], 4: ["aabb", "abbb"]}


@contextlib.contextmanager
def hosts(hvd, world, layout, transport):
    """Let the ranks believe that they are on these hosts."""
    names = {"HVDLITE_HOSTNAME": f"host-{layout[world.rank]}", "HVDLITE_TRANSPORT": transport}
    hvd.shutdown()
    os.environ.update(names)
    try:
        hvd.init()
        yield
        hvd.shutdown()
    finally:
        for name in names:
            del os.environ[name]


def check_layout(hvd, world, layout):
    mine = [rank for rank in world.ranks if layout[rank] == layout[world.rank]]
    place = mine.index(world.rank)
    assert (hvd.local_rank(), hvd.local_size()) == (place, len(mine))
    counts = {host: layout.count(host) for host in layout}
    peers = [host for host in counts if counts[host] > place]
    assert (hvd.cross_rank(), hvd.cross_size()) == (peers.index(layout[world.rank]), len(peers))
    assert hvd.is_homogeneous() == (len(set(counts.values())) == 1)


def check_reductions(hvd, world):
    wanted, handles = [], []
    for name in ("bool", "uint8", "float16", "bfloat16", "int64", "float32"):
        dtype = dtype_of(name)
        for op in OPS:
            if op == "Average" and dtype.kind == "b":
                continue
            for shape in ((1,), (70, 11)):
                inputs = [known(rank, shape, dtype) for rank in world.ranks]
                what = f"{name} {op} {shape}"
                wanted.append((reduced(inputs, op), what))
                handles.append(
                    hvd.allreduce_async(inputs[world.rank], op=getattr(hvd, op), name=what)
                )
    for handle, (total, what) in zip(handles, wanted, strict=True):
        assert_equal(hvd.synchronize(handle), total, what)


def check_others(hvd, world):
    size, rank = world.size, world.rank
    rows = [known(r, (r + 1, 300)) for r in world.ranks]
    assert_equal(hvd.allgather(rows[rank]), np.concatenate(rows))
    inputs = [known(r, (size, 5000)) for r in world.ranks]
    for root in world.ranks:
        assert_equal(hvd.broadcast(inputs[rank], root), inputs[root])
    wanted = np.stack([inputs[r][rank] for r in world.ranks])
    received = hvd.alltoall(inputs[rank])
    assert_equal(received[0] if isinstance(received, tuple) else received, wanted)
    pieces = hvd.reducescatter(inputs[rank], op=hvd.Sum)
    assert_equal(pieces, reduced(inputs, "Sum")[rank : rank + 1])
    hvd.barrier()


def check_large(hvd, world, comm):
    # Three chunks of the hierarchical transport, twice at once, and rounded sums.
    rng = np.random.default_rng(world.rank)
    mine = rng.normal(size=2 * 2**20 + 5).astype(np.float32)
    total = comm.allreduce(mine.astype(np.float64))
    handles = [hvd.allreduce_async(mine, op=hvd.Sum, name=f"large.{i}") for i in range(2)]
    for handle in handles:
        result = hvd.synchronize(handle)
        assert np.abs(result - total).max() < 1e-5
        assert len(set(comm.allgather(zlib.crc32(result)))) == 1


@pytest.mark.np(2, 3, 4)
@pytest.mark.limit(60)
def test_every_collective(hvd, world, comm):
    for layout in LAYOUTS[world.size]:
        with hosts(hvd, world, layout, "hierarchical"):
            check_layout(hvd, world, layout)
            check_reductions(hvd, world)
            check_others(hvd, world)
            check_large(hvd, world, comm)


@pytest.mark.np(4)
def test_the_choice_by_itself_and_in_process_sets(hvd, world, comm):
    from hvdlite.transport.hierarchical import HierarchicalTransport
    from hvdlite.transport.ring import RingTransport
    from hvdlite.transport.shared_memory import SharedMemoryTransport
    from hvdlite.world import engine

    with hosts(hvd, world, "aabb", "auto"):
        sets = {
            SharedMemoryTransport: hvd.add_process_set([0, 1]),
            RingTransport: hvd.add_process_set([1, 2]),
            HierarchicalTransport: hvd.add_process_set([0, 2, 3]),
        }
        channels = engine().channels
        assert type(channels[0].transport._large) is HierarchicalTransport
        for kind, group in sets.items():
            if not group.included():
                continue
            transport = channels[group.process_set_id].transport
            assert type(transport._large) is kind
            inputs = [known(rank, 100_000) for rank in group.ranks]
            mine = known(world.rank, 100_000)
            result = hvd.allreduce(mine, op=hvd.Sum, process_set=group)
            assert_equal(result, reduced(inputs, "Sum"), kind.__name__)
        check_large(hvd, world, comm)


@pytest.mark.whole_job
def test_init_lets_open_mpi_send_segments_at_once_unless_told_otherwise():
    script = """
        import os
        import hvdlite
        from jobtools import say
        hvdlite.init()
        names = "eager_limit", "rndv_eager_limit", "max_send_size"
        say(0, sizes=[os.environ.get(f"OMPI_MCA_btl_tcp_{name}") for name in names])
        hvdlite.shutdown()
    """
    result = run_job(1, script, env={"OMPI_MCA_btl_tcp_rndv_eager_limit": "70000"})
    assert result.returncode == 0, result
    first, second, third = map(int, result.said[0][0]["sizes"])
    segment = 256 * 2**10  # HVDLITE_SEGMENT_BYTES by default
    assert first > segment
    assert second == 70000
    assert third > segment
