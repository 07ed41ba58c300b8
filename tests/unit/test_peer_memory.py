"""Copies between processes by way of the kernel: right, refused, and interrupted."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from hvdlite.transport import peer_memory
from hvdlite.transport.peer_memory import PeerMemory, reach_peers
from hvdlite.transport.places import Places, address_of
from hvdlite.transport.shared_memory import SharedMemoryTransport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, drive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these calls")


@pytest.fixture
def child():
    """A process with numbers in memory that it shows; says what is there when asked."""
    program = """
        import ctypes, sys
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
        numbers = (ctypes.c_int * 4)(1, 2, 3, 4)
        print(ctypes.addressof(numbers), flush=True)
        for line in sys.stdin:
            print(*numbers, flush=True)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_another_process_is_read_and_written(child):
    process, address = child
    memory = PeerMemory([os.getpid(), process.pid])
    there = np.zeros(2, np.int32)
    memory.read(1, address + 4, there)
    assert there.tolist() == [2, 3]
    memory.write(1, address + 8, np.array([7, 8], np.int32))
    process.stdin.write("?\n")
    process.stdin.flush()
    assert process.stdout.readline().split() == ["1", "2", "7", "8"]


def test_what_one_call_cannot_copy_takes_several(child, monkeypatch):
    monkeypatch.setattr(peer_memory, "_MOST_BYTES", 7)
    process, address = child
    memory = PeerMemory([os.getpid(), process.pid])
    memory.write(1, address, np.array([5, 6, 7, 8], np.int32))
    there = np.zeros(4, np.int32)
    memory.read(1, address, there)
    assert there.tolist() == [5, 6, 7, 8]


def test_memory_that_is_not_there_is_known_before(monkeypatch):
    monkeypatch.setattr(peer_memory, "_MOST_PLACES", 6)
    memory = PeerMemory([os.getpid()])
    fine = [np.zeros(n, np.float32) for n in (1, 3, 5000, 2, 9)]
    assert memory.reaches_own(Places.of(fine))
    assert all(memory.reaches_own(Places.of([each])) for each in fine)
    nowhere = np.asarray(_At(8, 100))
    assert not memory.reaches_own(Places.of([nowhere]))
    assert not memory.reaches_own(Places.of([*fine, nowhere]))


class _At:
    def __init__(self, address, count):
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "typestr": "|u1",
            "version": 3,
        }


@pytest.mark.parametrize("unreachable", [[0], [1], [0, 1]])
def test_what_a_rank_cannot_show_goes_through_the_slots(unreachable):
    world = FakeWorld(2)
    creations = [
        [SharedMemoryTransport.creating(comm, 64, capacity=2**20, direct_bytes=1)]
        for comm in world.communicators
    ]
    transports = [made for (made,) in drive(world, creations)]
    for rank in unreachable:
        transports[rank]._peers.reaches_one = lambda *place: False
    buffers = [np.full(1000, rank + 1, np.float32) for rank in range(2)]
    drive(
        world,
        [
            [transport.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
            for transport, buffer in zip(transports, buffers, strict=True)
        ],
    )
    assert all((buffer == 3).all() for buffer in buffers)


def test_several_places_at_once(child):
    process, address = child
    memory = PeerMemory([os.getpid(), process.pid])
    there = np.array([[address + 12, 4], [address, 8]])
    found = np.zeros(3, np.int32)
    whole = described([found])
    memory.gather(1, address_of(whole), address_of(there), 2, 12)
    assert found.tolist() == [4, 1, 2]
    sources = [np.array([40], np.int32), np.array([10, 20], np.int32)]
    here = described(sources)
    memory.scatter(1, address_of(here), address_of(there), 2, 12)
    memory.read(1, address, found)
    assert found.tolist() == [10, 20, 3]
    there = np.array([[address, 8], [8, 4]])
    with pytest.raises(OSError, match="8 of 12 bytes were copied"):
        memory.gather(1, address_of(whole), address_of(there), 2, 12)


def described(arrays):
    return np.array([[address_of(each), each.nbytes] for each in arrays])


def test_what_is_not_there_is_an_error_that_names_the_rank(child):
    process, address = child
    memory = PeerMemory([os.getpid(), process.pid])
    with pytest.raises(OSError, match=f"rank 1 on this host .process {process.pid}.") as caught:
        memory.read(1, 8, np.zeros(4, np.int32))
    assert caught.value.errno == errno.EFAULT
    process.kill()
    process.wait()
    with pytest.raises(OSError, match="rank 1 .* may have ended") as caught:
        memory.write(1, address, np.zeros(4, np.int32))
    assert caught.value.errno == errno.ESRCH


def test_a_part_is_not_taken_for_the_whole():
    page = os.sysconf("SC_PAGE_SIZE")
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    )
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    start = library.mmap(None, 2 * page, 3, 0x22, -1, 0)
    assert library.munmap(start + page, page) == 0
    try:
        with pytest.raises(OSError, match=f"{page} of {2 * page} bytes were copied"):
            PeerMemory([os.getpid()]).read(0, start, np.zeros(2 * page, np.uint8))
    finally:
        library.munmap(start, page)


def reached(size):
    world = FakeWorld(size)
    found = [made for (made,) in drive(world, [[reach_peers(c)] for c in world.communicators])]
    world.check_quiet()
    return found


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_find_out_that_they_reach_each_other(size):
    assert None not in reached(size)


def refuse(monkeypatch, refused):
    """Let calls fail as `refused` says: (what, how often called before) to an error or None."""
    calls = {"read": 0, "write": 0}

    def wrapped(what):
        original = getattr(PeerMemory, what)

        def call(self, *arguments):
            calls[what] += 1
            error = refused(what, calls[what])
            if error is not None:
                raise error
            return original(self, *arguments)

        return call

    for what in calls:
        monkeypatch.setattr(PeerMemory, what, wrapped(what))


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_where_one_rank_is_refused_none_tries(monkeypatch, what, call):
    refuse(
        monkeypatch,
        lambda kind, count: OSError(errno.EPERM, "no") if (kind, count) == (what, call) else None,
    )
    assert reached(3) == [None] * 3


def test_another_process_of_the_same_number_is_found_out(monkeypatch):
    # As in another PID namespace: there is something at that address, but not the proof.
    read = PeerMemory.read

    def elsewhere(self, rank, address, into):
        read(self, rank, address, into)
        into[-1] ^= 1

    monkeypatch.setattr(PeerMemory, "read", elsewhere)
    written = []
    monkeypatch.setattr(PeerMemory, "write", lambda *arguments: written.append(arguments))
    assert reached(2) == [None] * 2
    assert not written


def test_writing_into_the_void_is_found_out(monkeypatch):
    monkeypatch.setattr(PeerMemory, "write", lambda *arguments: None)
    assert reached(2) == [None] * 2


def test_a_system_without_these_calls_does_without(monkeypatch):
    class Library:
        pass

    monkeypatch.setattr(peer_memory.ctypes, "CDLL", lambda *_, **__: Library())
    assert reached(2) == [None] * 2


def test_without_them_buffers_go_through_the_slots(monkeypatch):
    refuse(monkeypatch, lambda *_: OSError(errno.EPERM, "no"))
    world = FakeWorld(2)
    creations = [
        [SharedMemoryTransport.creating(comm, 64, capacity=2**20, direct_bytes=1)]
        for comm in world.communicators
    ]
    transports = [made for (made,) in drive(world, creations)]
    buffers = [np.full(1000, rank + 1, np.float32) for rank in range(2)]
    drive(
        world,
        [
            [transport.allreduce(buffer, DType.FLOAT32, ReduceOp.SUM, None, 0)]
            for transport, buffer in zip(transports, buffers, strict=True)
        ],
    )
    assert all((buffer == 3).all() for buffer in buffers)


def test_an_address_is_that_of_the_first_element():
    array = np.arange(10, dtype=np.int64)
    expected = array.__array_interface__["data"][0]
    assert address_of(array) == expected
    assert address_of(array[3:]) == expected + 24
    array.flags.writeable = False
    assert address_of(array) == expected
