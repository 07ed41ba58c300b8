"""What scripts for Horovod name and hvdlite has no other use for. Only the alias comes here."""

from __future__ import annotations

import importlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import hvdlite
from hvdlite import Average
from hvdlite.collectives import resolve_op
from hvdlite.transport.types import ReduceOp

__all__ = [
    "CommitStateCallback",
    "ElasticSampler",
    "HorovodBasics",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "TorchState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "env",
    "extension_available",
    "get_env_rank_and_size",
    "get_version_mismatch_message",
    "gpu_available",
    "handle_average_backwards_compatibility",
    "host_hash",
    "is_iterable",
    "is_version_greater_equal_than",
    "keras_distributed_optimizer",
    "notification_manager",
    "num_rank_is_power_2",
    "run",
    "run_fn",
    "split_list",
]

T = TypeVar("T")


class HorovodBasics:
    """The basic functions as methods: `HorovodBasics(path).rank()`."""

    def __init__(self, pkg_path: str | None = None, *args: object) -> None:
        """Take what Horovod takes: the place of a compiled library, which isn't there."""

    def __getattr__(self, name: str) -> Any:
        if name not in _BASICS:
            raise AttributeError(
                f"HorovodBasics has no {name!r} in hvdlite; see docs/migrating.md."
            )
        return getattr(hvdlite, name)


_BASICS = frozenset(
    "init shutdown is_initialized size local_size cross_size rank local_rank cross_rank "
    "is_homogeneous start_timeline stop_timeline mpi_threads_supported mpi_enabled mpi_built "
    "gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built".split()
)


# -- errors -------------------------------------------------------------------------------


class HostsUpdatedInterrupt(RuntimeError):
    """Raised by elastic jobs of Horovod when hosts come or go. hvdlite never raises it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Return what to tell a user whose framework has changed since installation."""
    return (
        f"Built for {name} {version}, but {name} {installed_version} is installed. hvdlite is "
        "built for nothing in particular and does not report this."
    )


class HorovodVersionMismatchError(ImportError):
    """A framework is not the one that Horovod was compiled for. hvdlite never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


# -- elastic: not there -------------------------------------------------------------------


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: hvdlite has no elastic training. Save checkpoints, and start the job again "
        "from the last one when ranks are lost; see docs/migrating.md."
    )


class State:
    """Stands for elastic state."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse(f"elastic.{type(self).__name__}")


class ObjectState(State):
    """Stands for elastic state of plain objects."""


class TorchState(ObjectState):
    """Stands for elastic state of a model and its optimizer."""


class TensorFlowState(ObjectState):
    """Stands for elastic state of TensorFlow's variables."""


class TensorFlowKerasState(ObjectState):
    """Stands for elastic state of a Keras model and its optimizer."""


class KerasState(TensorFlowKerasState):
    """Stands for elastic state of a Keras model and its optimizer."""


class CommitStateCallback(State):
    """Stands for a callback that saves elastic state."""


class UpdateBatchStateCallback(State):
    """Stands for a callback that counts batches in elastic state."""


class UpdateEpochStateCallback(State):
    """Stands for a callback that counts epochs in elastic state."""


class ElasticSampler(State):
    """Stands for a sampler that changes with the number of ranks."""


def run(func: object) -> NoReturn:
    """Refuse to make a training function elastic."""
    _refuse("elastic.run")


def run_fn(func: object, reset: object) -> NoReturn:
    """Refuse to make a training function elastic."""
    _refuse("elastic.run_fn")


class _NotificationManager:
    """Stands for what tells elastic workers about hosts."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"elastic.notification_manager.{name}")


notification_manager = _NotificationManager()


# -- Keras --------------------------------------------------------------------------------


def keras_distributed_optimizer(
    optimizer: T,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    num_groups: int = 0,
    groups: Any = None,
    **options: Any,
) -> T:
    """Call `hvdlite_tf.keras.DistributedOptimizer`, with horovod.keras's order of arguments."""
    # Not the adapter's own function: the ninth argument would be taken for another one.
    wrapped: T = importlib.import_module("hvdlite_tf.keras").DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups=num_groups,
        groups=groups,
        **options,
    )
    return wrapped


# -- utilities ----------------------------------------------------------------------------


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the time of a `with` block; None removes one."""
    before = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def split_list(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Divide a sequence into so many parts (fewer, if it is shorter), the first ones longer."""
    parts = min(num_parts, len(items)) or 1
    each, more = divmod(len(items), parts)
    starts = [i * each + min(i, more) for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(starts)]


def is_iterable(value: object) -> bool:
    """Return whether something can be iterated over."""
    return isinstance(value, Iterable)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two, which hvdlite's Adasum does not ask for."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def handle_average_backwards_compatibility(
    op: ReduceOp | int | None, average: bool | None
) -> ReduceOp:
    """Return the operation that `op`, or `average`, its old spelling, asks for."""
    return resolve_op(average, op)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size of this process as its environment has them, else 0 and 1."""
    names = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
    ]
    for rank, size in names:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def is_version_greater_equal_than(version: str, target: str) -> bool:
    """Return whether one dotted version is not older than another one."""

    def numbers(text: str) -> list[int]:
        parts = text.split("+")[0].split(".")
        return [int("".join(c for c in part if c.isdigit()) or 0) for part in parts]

    return numbers(version) >= numbers(target)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework's adapter can be used: hvdlite has no compiled extensions."""
    from importlib.util import find_spec

    return ext_base_name in ("torch", "tensorflow") and find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether collectives run on GPUs: never; tensors go through host memory."""
    return False


def host_hash(salt: str | None = None) -> str:
    """Return a name of this host."""
    return f"{socket.gethostname()}-{salt}" if salt else socket.gethostname()
