"""`import horovod` without Horovod: opt-in, lazy, and never in the way of the real one."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

__all__ = ["COMPATIBLE_VERSION", "MODULES", "install_horovod_alias"]

COMPATIBLE_VERSION = "0.28.1"
"""What `horovod.__version__` says: the release whose interface the alias has."""

_HINT = "docs/migrating.md of hvdlite lists all names of Horovod and what stands for them"
_COMPAT = "hvdlite.horovod_compat"


@dataclass(frozen=True)
class Source:
    """Where the names of one module of Horovod come from.

    Attributes:
        modules: looked through in this order; those that don't exist are passed over.
        only: the names that the module has; all public ones if None.
        extra: names that are called otherwise here, as "module:name".
    """

    modules: tuple[str, ...] = ()
    only: frozenset[str] | None = None
    extra: dict[str, str] = field(default_factory=dict)


def _only(module: str, names: str) -> Source:
    return Source((module,), frozenset(names.split()))


_ERROR = {"HorovodInternalError": "hvdlite:HvdliteInternalError"}
_ELASTIC = "TorchState ElasticSampler State ObjectState run"
_TF = Source(
    ("hvdlite_tf",),
    extra={
        "check_num_rank_power_of_2": f"{_COMPAT}:num_rank_is_power_2",
        "handle_average_backwards_compatibility": (
            f"{_COMPAT}:handle_average_backwards_compatibility"
        ),
    },
)
_KERAS = Source(("hvdlite_tf.keras",))
_KERAS_CALLBACKS = Source(("hvdlite_tf.keras.callbacks",))
_KERAS_ELASTIC = _only(
    _COMPAT,
    "KerasState CommitStateCallback UpdateBatchStateCallback UpdateEpochStateCallback run",
)

MODULES: dict[str, Source] = {
    "horovod": Source(extra={"run": "hvdlite:run"}),
    "horovod.torch": Source(("hvdlite_torch",)),
    "horovod.torch.mpi_ops": Source(("hvdlite_torch",)),
    "horovod.torch.compression": Source(("hvdlite_torch.compression",)),
    "horovod.torch.functions": _only(
        "hvdlite_torch",
        "allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters",
    ),
    "horovod.torch.optimizer": _only("hvdlite_torch", "DistributedOptimizer"),
    "horovod.torch.sync_batch_norm": _only("hvdlite_torch", "SyncBatchNorm"),
    "horovod.torch.elastic": _only(_COMPAT, _ELASTIC),
    "horovod.torch.elastic.state": _only(_COMPAT, "TorchState"),
    "horovod.torch.elastic.sampler": _only(_COMPAT, "ElasticSampler"),
    "horovod.tensorflow": _TF,
    "horovod.tensorflow.mpi_ops": _TF,
    "horovod.tensorflow.functions": _only(
        "hvdlite_tf",
        "allgather_object broadcast_object broadcast_object_fn broadcast_variables",
    ),
    "horovod.tensorflow.compression": Source(("hvdlite_tf.compression",)),
    "horovod.tensorflow.sync_batch_norm": _only("hvdlite_tf", "SyncBatchNormalization"),
    "horovod.tensorflow.elastic": _only(_COMPAT, "TensorFlowKerasState TensorFlowState run"),
    "horovod.tensorflow.keras": _KERAS,
    "horovod.tensorflow.keras.callbacks": _KERAS_CALLBACKS,
    "horovod.tensorflow.keras.elastic": _KERAS_ELASTIC,
    "horovod.keras": Source(
        ("hvdlite_tf.keras",),
        extra={"DistributedOptimizer": f"{_COMPAT}:keras_distributed_optimizer"},
    ),
    "horovod.keras.callbacks": _KERAS_CALLBACKS,
    "horovod.keras.elastic": _KERAS_ELASTIC,
    "horovod.common": Source(),
    "horovod.common.basics": _only(_COMPAT, "HorovodBasics"),
    "horovod.common.util": _only(
        _COMPAT,
        "env extension_available gpu_available is_iterable is_version_greater_equal_than "
        "num_rank_is_power_2 split_list",
    ),
    "horovod.common.process_sets": _only(
        "hvdlite", "ProcessSet global_process_set add_process_set remove_process_set"
    ),
    "horovod.common.exceptions": Source(
        (_COMPAT,),
        frozenset(
            ["HostsUpdatedInterrupt", "HorovodVersionMismatchError", "get_version_mismatch_message"]
        ),
        _ERROR,
    ),
    "horovod.common.elastic": _only(_COMPAT, "State ObjectState run_fn notification_manager"),
    "horovod.runner": Source(extra={"run": "hvdlite:run"}),
    "horovod.runner.common": Source(),
    "horovod.runner.common.util": Source(),
    "horovod.runner.common.util.env": _only(_COMPAT, "env get_env_rank_and_size"),
    "horovod.runner.common.util.host_hash": _only(_COMPAT, "host_hash"),
}
"""Every module of the alias."""


class _AliasModule(ModuleType):
    """A module that looks its names up in hvdlite when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        full_name = f"{self.__name__}.{name}"
        if full_name in MODULES:
            return importlib.import_module(full_name)
        try:
            return _find(MODULES[self.__name__], name)
        except LookupError:
            raise AttributeError(_missing(full_name), name=name, obj=self) from None

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *_names(self.__name__)})


def _missing(full_name: str) -> str:
    return f"{full_name} does not exist: this 'horovod' is the alias of hvdlite. {_HINT}."


def _find(source: Source, name: str) -> Any:
    target = source.extra.get(name)
    if target is not None:
        module_name, _, attribute = target.partition(":")
        module = _module(module_name)
        if hasattr(module, attribute):
            return getattr(module, attribute)
        raise LookupError(name)
    if name.startswith("_") or (source.only is not None and name not in source.only):
        raise LookupError(name)
    for module_name in source.modules:
        module = _module(module_name)
        if module is None:
            continue
        # A module that lists nothing may have something to say about a name all the same.
        if not getattr(module, "__all__", None) or name in module.__all__:
            try:
                return getattr(module, name)
            except AttributeError:
                continue
    raise LookupError(name)


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Of hvdlite: not there yet. Of anything else: PyTorch or TensorFlow is missing.
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _names(full_name: str) -> set[str]:
    """Return the public names of a module of the alias."""
    source = MODULES[full_name]
    found = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == full_name}
    found |= {name for name, target in source.extra.items() if _exists(target)}
    if source.only is not None:
        return found | source.only
    for module_name in source.modules:
        found |= set(getattr(_module(module_name), "__all__", ()))
    return found


def _exists(target: str) -> bool:
    module_name, _, attribute = target.partition(":")
    return hasattr(_module(module_name), attribute)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the alias, and explains what is no module of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MODULES:
            # All are packages, so that whatever is imported from them and isn't there is
            # looked for here, and its absence can be explained.
            return importlib.machinery.ModuleSpec(
                fullname, self, origin="hvdlite.horovod_alias", is_package=True
            )
        if fullname.startswith("horovod."):
            raise ImportError(_missing(fullname), name=fullname)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AliasModule(spec.name, f"{spec.name}, as hvdlite provides it.")

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "horovod":
            module.__dict__["__version__"] = COMPATIBLE_VERSION
        if MODULES[module.__name__].modules:
            # For `from horovod.torch import *`, and so that where PyTorch is missing importing
            # horovod.torch fails and not its first use.
            module.__dict__["__all__"] = sorted(_names(module.__name__) - _submodules(module))


def _submodules(module: ModuleType) -> set[str]:
    prefix = f"{module.__name__}."
    return {name.removeprefix(prefix) for name in MODULES if name.startswith(prefix)}


_finder = _Finder()


def install_horovod_alias(force: bool = False) -> None:
    """Make `import horovod` and its submodules find hvdlite in this process.

    Only what a script imports is loaded: TensorFlow stays out of PyTorch scripts. The names are
    hvdlite's own objects; one that doesn't exist raises an error that says where to read on.
    Processes that are spawned have to call this for themselves. A second call does nothing.

    Args:
        force: put the alias in front of a Horovod that is installed.

    Raises:
        ImportError: Horovod is installed, or was imported already, and `force` is not set.
    """
    if _finder in sys.meta_path:
        return
    loaded = sys.modules.get("horovod")
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec("horovod")
    # A folder without __init__.py that happens to bear the name is nothing in the way.
    if spec is not None and spec.origin is not None and not force:
        raise ImportError(
            f"Horovod is installed ({spec.origin}), and the alias does not hide it unless told "
            "to: pass force=True (or --force on the command line), or uninstall it.",
            name="horovod",
        )
    for name in [n for n in sys.modules if n == "horovod" or n.startswith("horovod.")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _finder)
