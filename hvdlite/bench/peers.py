"""What is compared, behind one interface: in-place sums of arrays over all ranks."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from ..transport.types import Array, DType, ReduceOp
from .timing import Unavailable

__all__ = ["MODULE", "Gloo", "Peer", "check", "make", "start_gloo"]

MODULE = "module:"
"""Before the name of a module with Horovod's interface, where a peer is named."""

Step = Callable[[], object]


class Peer:
    """Sums arrays over all ranks, in place. Arrays hold `dtype.storage`."""

    def allocate(self, nbytes: int) -> Array:
        """Return bytes of the kind of memory that this peer is measured on."""
        memory = np.empty(nbytes, dtype=np.uint8)
        memory.fill(0)  # an untouched page is not memory yet
        return memory

    def blocking(self, array: Array, dtype: DType) -> Step:
        """Return a call that sums one array and waits for it."""
        raise NotImplementedError

    def many(self, arrays: Sequence[Array]) -> Step:
        """Return a call that begins the sums of float32 arrays, then waits for all."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave."""


class Hvdlite(Peer):
    """Ordinary arrays through the engine: what a user of NumPy arrays gets."""

    resident = False

    def __init__(self) -> None:
        import hvdlite

        hvdlite.init()
        self.hvd = hvdlite

    def blocking(self, array: Array, dtype: DType) -> Step:
        from ..engine.submit import submit_allreduce
        from ..world import attended

        resident, everybody = self.resident, self.hvd.global_process_set

        def step() -> None:
            with attended():
                submit_allreduce(
                    [array],
                    [array],
                    dtypes=[dtype],
                    name="tensor",
                    op=ReduceOp.SUM,
                    process_set=everybody,
                    resident=resident,
                ).wait()

        if dtype is DType.BFLOAT16 or resident:
            return step
        hvd = self.hvd
        return lambda: hvd.allreduce_(array, op=hvd.Sum, name="tensor")

    def many(self, arrays: Sequence[Array]) -> Step:
        hvd = self.hvd
        named = [(f"tensor.{i}", array) for i, array in enumerate(arrays)]

        def step() -> None:
            handles = [hvd.allreduce_async_(array, op=hvd.Sum, name=name) for name, array in named]
            for handle in handles:
                hvd.synchronize(handle)

        return step

    def close(self) -> None:
        self.hvd.shutdown()


class Resident(Hvdlite):
    """Arrays in memory that the ranks share, through the engine: what optimizers use."""

    resident = True

    def allocate(self, nbytes: int) -> Array:
        from ..engine.submit import allocate_buffer

        array = allocate_buffer(nbytes)
        _require_shared(array)
        return array


class Parts(Hvdlite):
    """Sixteen parts of an ordinary array, as one group: what a bucket of gradients is."""

    def blocking(self, array: Array, dtype: DType) -> Step:
        from ..engine.submit import submit_allreduce
        from ..world import attended

        everybody = self.hvd.global_process_set
        parts = [part for part in np.array_split(array, 16) if len(part)]
        dtypes = [dtype] * len(parts)

        def step() -> None:
            with attended():
                submit_allreduce(
                    parts,
                    parts,
                    dtypes=dtypes,
                    name="parts",
                    op=ReduceOp.SUM,
                    process_set=everybody,
                    resident=True,
                ).wait()

        return step


class SharedMemory(Peer):
    """The transport alone, on arrays in memory that the ranks share; no engine."""

    def __init__(self) -> None:
        from ..transport.mpi_communicator import MPICommunicator
        from ..transport.shared_memory import SharedMemoryTransport

        reasons: list[str] = []
        made = SharedMemoryTransport.create(
            MPICommunicator(MPI.COMM_WORLD.Dup()), refused=reasons.append
        )
        if made is None:
            raise Unavailable(f"no shared memory: {'; '.join(reasons)}")
        self.transport = made

    def allocate(self, nbytes: int) -> Array:
        array = self.transport.allocate(nbytes)
        _require_shared(array)
        array[...] = 0
        return array

    def blocking(self, array: Array, dtype: DType) -> Step:
        transport = self.transport

        def step() -> None:
            for pending in transport.allreduce(array, dtype, ReduceOp.SUM, None, 0):
                while not pending.Test():
                    os.sched_yield()

        return step

    def close(self) -> None:
        self.transport.close()


class Ordinary(SharedMemory):
    """The transport alone, on ordinary arrays: what the engine adds is the rest."""

    def allocate(self, nbytes: int) -> Array:
        return Peer.allocate(self, nbytes)


class RawMPI(Peer):
    """The MPI library's own Allreduce, which negotiates nothing."""

    def blocking(self, array: Array, dtype: DType) -> Step:
        if dtype is not DType.FLOAT32:
            raise Unavailable(f"MPI has no {dtype}")
        comm, message = MPI.COMM_WORLD, [array, array.size, MPI.FLOAT]
        return lambda: comm.Allreduce(MPI.IN_PLACE, message)

    def many(self, arrays: Sequence[Array]) -> Step:
        steps = [self.blocking(array.reshape(-1), DType.FLOAT32) for array in arrays]

        def step() -> None:
            for one in steps:
                one()

        return step


def start_gloo() -> Any:
    """Join torch.distributed with Gloo, on the ranks of MPI, and return the module."""
    import torch
    import torch.distributed as dist

    comm = MPI.COMM_WORLD
    port = None
    if comm.Get_rank() == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(comm.bcast(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=comm.Get_rank(), world_size=comm.Get_size())
    return dist


class Gloo(Peer):
    """torch.distributed. `many` gets the same bytes in pieces of 25 MiB, as DDP makes them."""

    PIECE_BYTES = 25 << 20

    def __init__(self) -> None:
        self.dist = start_gloo()

    def blocking(self, array: Array, dtype: DType) -> Step:
        dist, tensor = self.dist, as_tensor(array, dtype)
        return lambda: dist.all_reduce(tensor)

    def many(self, arrays: Sequence[Array]) -> Step:
        torch: Any = importlib.import_module("torch")
        total = sum(array.size for array in arrays)
        pieces = torch.zeros(total).split(self.PIECE_BYTES // 4)
        dist = self.dist

        def step() -> None:
            works = [dist.all_reduce(piece, async_op=True) for piece in pieces]
            for work in works:
                work.wait()

        return step

    def close(self) -> None:
        self.dist.destroy_process_group()


class Module(Peer):
    """Anything with Horovod's interface on torch tensors."""

    def __init__(self, name: str) -> None:
        import torch

        torch.set_num_threads(1)
        self.hvd: Any = importlib.import_module(name)
        self.hvd.init()
        if self.hvd.size() != MPI.COMM_WORLD.Get_size():
            raise Unavailable(f"{name} sees {self.hvd.size()} ranks; it does not go with mpirun")

    def blocking(self, array: Array, dtype: DType) -> Step:
        hvd, tensor = self.hvd, as_tensor(array, dtype)
        return lambda: hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="tensor"))

    def many(self, arrays: Sequence[Array]) -> Step:
        hvd = self.hvd
        named = [(f"tensor.{i}", as_tensor(a, DType.FLOAT32)) for i, a in enumerate(arrays)]

        def step() -> None:
            handles = [hvd.allreduce_async_(t, op=hvd.Sum, name=name) for name, t in named]
            for handle in handles:
                hvd.synchronize(handle)

        return step

    def close(self) -> None:
        self.hvd.shutdown()


def make(name: str) -> Peer:
    """Return the peer of a name (collective)."""
    if name.startswith(MODULE):
        return Module(name.removeprefix(MODULE))
    kinds: dict[str, Callable[[], Peer]] = {
        "hvdlite": Hvdlite,
        "hvdlite-resident": Resident,
        "hvdlite-parts": Parts,
        "transport": SharedMemory,
        "transport-ordinary": Ordinary,
        "gloo": Gloo,
    }
    return RawMPI() if name.startswith("mpi") else kinds[name]()


def as_tensor(array: Array, dtype: DType) -> Any:
    """Return a torch tensor in the memory of an array."""
    import torch

    if dtype is DType.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_ONE = {DType.FLOAT32: 1.0, DType.FLOAT16: 1.0, DType.BFLOAT16: 0x3F80}


def check(step: Step, array: Array, dtype: DType) -> None:
    """Find out whether a step really sums: ones on every rank. Leaves zeros.

    Raises:
        RuntimeError: it does not.
    """
    array.fill(_ONE[dtype])
    step()
    some = array[:: max(1, array.size >> 16)]
    wide = some.astype(np.float32)
    if dtype is DType.BFLOAT16:
        wide = (some.astype(np.uint32) << 16).view(np.float32)
    if not (wide == MPI.COMM_WORLD.Get_size()).all():
        raise RuntimeError(f"a wrong sum of {array.size} {dtype}: {wide[:4]} ...")
    array.fill(0)


def _require_shared(array: Array) -> None:
    """Raise Unavailable, on all ranks, unless all their arrays lie in shared memory."""
    shared = MPI.COMM_WORLD.allreduce(_is_memfd(array.ctypes.data), op=MPI.LAND)
    if not shared:
        raise Unavailable(f"the ranks share no {array.nbytes} bytes of memory")


def _is_memfd(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(text, 16) for text in line.split(maxsplit=1)[0].split("-"))
        if start <= address < stop:
            return "/memfd:" in line
    return False
