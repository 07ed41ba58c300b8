"""What is compared, behind one interface: in-place sums of float32 arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

__all__ = ["PEERS", "Peer", "make"]


class Peer:
    """Sums arrays over all ranks, in place."""

    def blocking(self, array: np.ndarray) -> Callable[[], object]:
        """Return a call that sums one array and waits for it."""
        raise NotImplementedError

    def many(self, arrays: Sequence[np.ndarray]) -> Callable[[], object]:
        """Return a call that begins the sums of all arrays, then waits for them."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave."""


class Hvdlite(Peer):
    def __init__(self) -> None:
        import hvdlite

        hvdlite.init()
        self.hvd = hvdlite

    def blocking(self, array: np.ndarray) -> Callable[[], object]:
        hvd = self.hvd
        return lambda: hvd.allreduce_(array, op=hvd.Sum, name="tensor")

    def many(self, arrays: Sequence[np.ndarray]) -> Callable[[], object]:
        hvd = self.hvd

        def step() -> None:
            handles = [
                hvd.allreduce_async_(array, op=hvd.Sum, name=f"tensor.{i}")
                for i, array in enumerate(arrays)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        return step

    def close(self) -> None:
        self.hvd.shutdown()


class RawMPI(Peer):
    """The MPI library's own Allreduce, without negotiation."""

    def blocking(self, array: np.ndarray) -> Callable[[], object]:
        comm = MPI.COMM_WORLD
        return lambda: comm.Allreduce(MPI.IN_PLACE, array)

    def many(self, arrays: Sequence[np.ndarray]) -> Callable[[], object]:
        def step() -> None:
            for array in arrays:
                MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)

        return step


class Gloo(Peer):
    """torch.distributed. `many` reduces the same bytes in pieces of 25 MiB, as DDP would."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        comm = MPI.COMM_WORLD
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        port = None
        if comm.Get_rank() == 0:
            import socket

            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        os.environ["MASTER_PORT"] = str(comm.bcast(port))
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=comm.Get_rank(), world_size=comm.Get_size())
        self.torch, self.dist = torch, dist

    def blocking(self, array: np.ndarray) -> Callable[[], object]:
        tensor = self.torch.from_numpy(array)
        return lambda: self.dist.all_reduce(tensor)

    def many(self, arrays: Sequence[np.ndarray]) -> Callable[[], object]:
        total = sum(array.size for array in arrays)
        pieces = self.torch.zeros(total).split(25 * 1024 * 1024 // 4)

        def step() -> None:
            works = [self.dist.all_reduce(piece, async_op=True) for piece in pieces]
            for work in works:
                work.wait()

        return step

    def close(self) -> None:
        self.dist.destroy_process_group()


PEERS: dict[str, Callable[[], Peer]] = {"hvdlite": Hvdlite, "mpi": RawMPI, "gloo": Gloo}


def make(name: str) -> Peer:
    """Return the peer of a name."""
    return PEERS[name]()
