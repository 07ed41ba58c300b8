"""Shared memory: what is allocated, when it is freed, and when the ranks do without."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from hvdlite.transport import shared_segment
from hvdlite.transport.local_communicator import LocalCommunicator
from hvdlite.transport.shared_memory import SharedMemoryTransport
from hvdlite.transport.shared_segment import SegmentUnavailableError

from .fake_mpi import FakeWorld, drive
from .test_shared_memory import make

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no anonymous files"
)


# -- memory -----------------------------------------------------------------------------


def test_memory_comes_from_the_segment_until_there_is_none_left():
    _, _, (transport,) = make(1, capacity=2**16)
    before = transport._segments.nbytes
    first = transport.allocate(2**15)
    second = transport.allocate(2**15)
    third = transport.allocate(2**15)
    offsets = [transport._segments.offset_of(array) for array in (first, second, third)]
    assert offsets[0] > 0 and offsets[1] == offsets[0] + 2**15 and offsets[2] == -1
    assert transport._segments.nbytes == before + 2**16
    for array in (first, second, third):
        array[:] = 1
        assert array.dtype == np.uint8 and len(array) == 2**15


def test_memory_is_freed_with_its_last_view():
    _, _, (transport,) = make(1, capacity=2**16)
    before = transport._segments.nbytes
    array = transport.allocate(2**16)
    array[:] = 7
    view = array[100:200].view(np.float32)
    del array
    gc.collect()
    assert transport._segments.nbytes == before + 2**16
    assert transport._segments.offset_of(transport.allocate(1)) == -1
    del view
    gc.collect()
    assert transport._segments.nbytes == before
    # Fresh pages are zero: the used ones went back to the system.
    assert not transport.allocate(2**16).any()


def test_freed_neighbours_become_one():
    _, _, (transport,) = make(1, capacity=2**16)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [0, 2, 1, 3]):
        arrays = {i: transport.allocate(2**14) for i in range(4)}
        assert all(transport._segments.offset_of(array) > 0 for array in arrays.values())
        for i in order:
            del arrays[i]
        whole = transport.allocate(2**16)
        assert transport._segments.offset_of(whole) > 0
        del whole


def test_an_address_next_to_the_segment_is_elsewhere():
    _, _, (transport,) = make(1)
    segments = transport._segments
    array = transport.allocate(128)
    offset = segments.offset_of(array)
    assert offset % 4096 == 0
    assert segments.offset_of(array[5:]) == offset + 5
    assert segments.offset_of(np.zeros(100)) == -1
    end = segments._segments[0][-8:]
    assert segments.offset_of(end) == segments._size - 8


def test_arrays_outlive_the_transport():
    world, _, transports = make(2)
    array = transports[0].allocate(1000)
    array[:] = 3
    for transport in transports:
        transport.close()
    assert all(all(group.freed) for group in world.groups[1:])
    assert transports[0].allocate(10).nbytes == 10
    del transports, transport
    gc.collect()
    assert (array == 3).all()


# -- refusals ---------------------------------------------------------------------------


def refusals(size):
    """Make transports where it fails; return what each rank is told."""
    world = FakeWorld(size)
    told = []

    def attempt(comm):
        try:
            yield from SharedMemoryTransport.creating(comm, 64, capacity=2**16)
        except SegmentUnavailableError as error:
            told.append(str(error))

    descriptors = len(os.listdir("/proc/self/fd"))
    drive(world, [[attempt(comm)] for comm in world.communicators])
    world.check_quiet()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(told) == size and len(set(told)) == 1
    return told[0]


def test_all_refuse_when_one_rank_cannot_make_a_segment(monkeypatch):
    calls = []
    really = os.memfd_create

    def fail_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSYS, "Function not implemented")
        return really(*arguments)

    monkeypatch.setattr(os, "memfd_create", fail_second)
    text = refusals(3)
    assert text.startswith("rank 1 cannot make a shared segment") and "not implemented" in text


def test_all_refuse_on_systems_without_anonymous_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert refusals(2).startswith("rank 0 cannot make a shared segment")


def test_all_refuse_when_one_rank_cannot_map_another(monkeypatch):
    really = shared_segment._open
    calls = []

    def fail_last(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise OSError(errno.EACCES, "Permission denied")
        return really(*arguments)

    monkeypatch.setattr(shared_segment, "_open", fail_last)
    assert "cannot map the segment of rank" in refusals(3)


def test_a_process_of_another_namespace_is_recognized(monkeypatch):
    # There, the same number is another process, or none, and its descriptor another file.
    numbers = iter([os.getpid(), 2**22 + 1, os.getpid(), os.getpid()])
    monkeypatch.setattr(shared_segment.os, "getpid", lambda: next(numbers, 1))
    assert "cannot map the segment of rank 1" in refusals(2)


def test_a_file_of_another_process_is_recognized(tmp_path):
    with open(tmp_path / "other", "w+b") as file:
        file.truncate(8192)
        with pytest.raises(ValueError, match="belongs to another process"):
            shared_segment._open(os.getpid(), file.fileno(), 8192, b"x" * 16)


def test_a_segment_with_another_token_is_recognized():
    token = b"x" * 16
    descriptor, memory = shared_segment._make(token, 8192)
    try:
        assert shared_segment._open(os.getpid(), descriptor, 8192, token)[:16] == token
        memory[:16] = b"y" * 16
        with pytest.raises(ValueError, match="does not hold"):
            shared_segment._open(os.getpid(), descriptor, 8192, token)
    finally:
        os.close(descriptor)


def test_create_tells_why_there_is_no_transport(monkeypatch):
    assert isinstance(SharedMemoryTransport.create(LocalCommunicator()), SharedMemoryTransport)
    monkeypatch.delattr(os, "memfd_create")
    told = []
    assert SharedMemoryTransport.create(LocalCommunicator(), refused=told.append) is None
    assert SharedMemoryTransport.create(LocalCommunicator()) is None
    assert len(told) == 1 and "memfd_create" in told[0]


# -- processes --------------------------------------------------------------------------


def run_script(text, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_a_fork_leaves_the_memory_of_its_parent_alone():
    result = run_script(
        """
        import gc, os
        from hvdlite.transport.local_communicator import LocalCommunicator
        from hvdlite.transport.shared_memory import SharedMemoryTransport
        transport = SharedMemoryTransport.create(LocalCommunicator())
        array = transport.allocate(100000)
        array[:] = 5
        child = os.fork()
        if child == 0:
            assert (array == 5).all()
            del array
            gc.collect()
            assert transport._segments.offset_of(transport.allocate(10)) == -1
            transport._segments.nbytes
            transport.close()
            raise SystemExit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (array == 5).all()
        assert transport._segments.offset_of(transport.allocate(10)) > 0
        print("fine")
        """
    )
    assert result.stdout == "fine\n", result.stderr


def test_a_killed_process_leaves_no_file():
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    before = {folder: set(os.listdir(folder)) for folder in folders if folder.is_dir()}
    result = run_script(
        """
        import os, signal
        from hvdlite.transport.local_communicator import LocalCommunicator
        from hvdlite.transport.shared_memory import SharedMemoryTransport
        transport = SharedMemoryTransport.create(LocalCommunicator())
        transport.allocate(10**6)[:] = 1
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    for folder, names in before.items():
        assert not [name for name in set(os.listdir(folder)) - names if "hvdlite" in name]
