"""`DistributedOptimizer`: an optimizer whose steps wait for the gradients of all ranks.

The user's optimizer is not replaced. It gets a hook that runs before each step, and a few
methods; its class, state, options, schedulers and hooks stay what they are.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hvdlite import ProcessSet, global_process_set
from hvdlite.transport.types import ReduceOp
from hvdlite.world import current

from .adasum import AdasumReducer
from .amp import teach_grad_scaler
from .arguments import (
    checked_compression,
    checked_factor,
    checked_integer,
    checked_op,
    checked_process_set,
    whereabouts,
)
from .compression import Compression, Compressor
from .compressors import GradientCompressor
from .layout import Reduction
from .names import Label, clean_names
from .reducer import Reducer
from .step_reducer import Options, StepReducer

__all__ = ["DistributedOptimizer"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Groups = int | Sequence[Sequence[torch.Tensor]] | None

_ME = "DistributedOptimizer"
_FIRST_BUCKET_BYTES = 1 << 20

_REDUCER = "_hvdlite_reducer"
# What the optimizer gets. On the instance, because the class is the user's; that pickle and
# copy look for __reduce_ex__ there first is what keeps copies distributed.
_ATTRIBUTES = (
    _REDUCER,
    "synchronize",
    "skip_synchronize",
    "set_backward_passes_per_step",
    "zero_grad",
    "__reduce_ex__",
)
_counters: defaultdict[int | None, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of optimizers within each process set: all its ranks create the same ones."""


def DistributedOptimizer(
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | GradientCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_bytes: int | None = None,
) -> OptimizerT:
    """Make an optimizer reduce gradients over all ranks before every step.

    Gradients are reduced in buckets while the backward pass goes on. A parameter's gradient may
    become a view of its bucket, and the next backward pass may overwrite it: `clone()` a
    gradient to keep it. A parameter without a gradient on one rank counts as
    zero there; without one on any rank it keeps `grad is None`. Set `grad` to None between
    backward and step on all ranks alike, or on none. The closure of `step(closure)`
    is followed by a reduction each time it is evaluated, of the loss that it returns too.

    Gradients must be complete before something else reads or changes them: call `synchronize()`
    before clipping, say, and then step within `skip_synchronize()`. `torch.amp.GradScaler` does
    so by itself. Where gradients were changed between `backward()` and `step()`, `step()` raises
    RuntimeError; only what goes through `p.grad.data` or NumPy can it not see.

    Args:
        optimizer: any `torch.optim.Optimizer`; the very object is changed and returned.
        named_parameters: what `model.named_parameters()` returns. Names identify gradients
            across ranks; without them, positions do.
        compression: what makes gradients smaller on the wire: a member of `Compression`, made
            with the same parameters on all ranks.
        backward_passes_per_step: how many backward passes accumulate before the gradients are
            reduced. They accumulate as a sum: divide the loss by their number for the mean.
        op: Average, Sum, or Adasum, which leaves gradients alone: each rank steps by itself, and
            the ranks' steps are combined. Optimizer state then differs between ranks; groups
            and buckets have no meaning.
        gradient_predivide_factor: divides gradients before they are summed and multiplies them
            again after; the result is still their average.
        num_groups: older spelling of `groups` as a number.
        groups: into how many buckets to divide the parameters, or lists of parameters that
            are to be reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones.
        process_set: the ranks that train together.
        bucket_bytes: size of the buckets, HVDLITE_BUCKET_BYTES by default; the first one is
            smaller.

    Returns:
        The optimizer, which now has the methods `synchronize()`, `skip_synchronize()` and
        `set_backward_passes_per_step(passes)`.

    Raises:
        TypeError: an argument is of a wrong kind, such as an `optimizer` that is none.
        ValueError: an argument doesn't fit, or names are missing, duplicate or not strings.
    """
    where = whereabouts()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{_ME}: argument 'optimizer' must be a torch.optim.Optimizer, "
            f"not {type(optimizer).__name__} ({where})."
        )
    if _REDUCER in vars(optimizer):
        raise ValueError(f"{_ME}: this optimizer is a distributed one already ({where}).")
    op = checked_op(op, _ME)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise ValueError(f"{_ME}: op must be Average, Sum or Adasum, not {op} ({where}).")
    factor = checked_factor(
        gradient_predivide_factor, _ME, "gradient_predivide_factor", positive=True
    )
    if isinstance(compression, type) and issubclass(compression, GradientCompressor):
        compression = compression()
    if isinstance(compression, GradientCompressor):
        if op is ReduceOp.ADASUM:
            raise ValueError(
                f"{_ME}: {compression} goes with op=Average or Sum, not with Adasum ({where})."
            )
        if factor != 1.0:
            raise ValueError(
                f"{_ME}: gradient_predivide_factor does not go with {compression} ({where})."
            )
    if factor != 1.0 and op is not ReduceOp.AVERAGE:
        raise ValueError(
            f"{_ME}: gradient_predivide_factor goes with op=Average only, not {op} ({where})."
        )
    if not isinstance(compression, GradientCompressor):
        compression = checked_compression(compression, _ME)
    process_set = checked_process_set(process_set, _ME)
    passes = checked_integer(backward_passes_per_step, _ME, "backward_passes_per_step", 1)
    if bucket_bytes is None:
        bucket_bytes = current().settings.bucket_bytes
    size_of_bucket = checked_integer(bucket_bytes, _ME, "bucket_bytes", 1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = _names(named_parameters, parameters)
    reduction = Reduction(op, 1.0 / factor, factor, compression, bool(sparse_as_dense), process_set)
    members = _groups(num_groups, groups, parameters)
    label = Label(f"DistributedOptimizer.{next(_counters[process_set.process_set_id])}")
    sizes = size_of_bucket, min(_FIRST_BUCKET_BYTES, size_of_bucket)
    _distribute(optimizer, label, Options(names, members, reduction, passes, sizes))
    return optimizer


def _distribute(optimizer: torch.optim.Optimizer, label: Label, options: Options) -> None:
    kind = AdasumReducer if options.reduction.op is ReduceOp.ADASUM else Reducer
    reducer: StepReducer = kind(optimizer, label, options)
    handle = optimizer.register_step_pre_hook(reducer.before_step)
    # The user's own hooks are to see what is reduced, whenever they were registered.
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    handle = optimizer.register_step_post_hook(reducer.after_step)
    hooks = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    values = (
        reducer,
        reducer.synchronize,
        reducer.skip_synchronize,
        reducer.set_backward_passes_per_step,
        reducer.zero_grad,
        functools.partial(_pickled, reducer),
    )
    for name, value in zip(_ATTRIBUTES, values, strict=True):
        setattr(optimizer, name, value)
    teach_grad_scaler(_before_unscaling, _after_scaled_step)


def _pickled(reducer: StepReducer, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Take a distributed optimizer apart into a plain one and what else it takes."""
    optimizer = reducer.optimizer
    reduction = reducer.reduction
    if reduction.process_set is not global_process_set:
        raise TypeError(
            "An optimizer that is distributed over a process set cannot be copied or pickled: "
            "save optimizer.state_dict(), which is the plain optimizer's, and load it into one "
            "that was made in the same way."
        )
    parts: Any = type(optimizer).__reduce_ex__(optimizer, protocol)
    create, arguments, state, *_ = parts
    state = {key: value for key, value in state.items() if key not in _ATTRIBUTES}
    plain = create(*arguments)
    plain.__setstate__(state)
    options = vars(reducer.options) | {
        "names": list(reducer.names.items()),
        "groups": list(reducer.groups.items()),
        "reduction": vars(reduction) | {"process_set": None},
    }
    return _restored, (plain, str(reducer.label), options)


def _restored(plain: torch.optim.Optimizer, label: str, options: dict[str, Any]) -> Any:
    """Put a distributed optimizer together again."""
    names: Any = WeakIdKeyDictionary()
    groups: Any = WeakIdKeyDictionary()
    names.update(options.pop("names"))
    groups.update(options.pop("groups"))
    reduction = Reduction(**options.pop("reduction") | {"process_set": global_process_set})
    copy = Label(label, is_copy=True)
    _distribute(plain, copy, Options(names, groups, reduction, **options))
    return plain


def _before_unscaling(optimizer: torch.optim.Optimizer) -> None:
    reducer = getattr(optimizer, _REDUCER, None)
    if reducer is not None:
        reducer.settle()


def _after_scaled_step(optimizer: torch.optim.Optimizer) -> None:
    reducer = getattr(optimizer, _REDUCER, None)
    if reducer is not None:
        reducer.after_step()


def _names(named: Iterable[Any] | None, parameters: Sequence[torch.Tensor]) -> Any:
    """Return the names of parameters, or an empty dictionary if none are given."""
    names: Any = WeakIdKeyDictionary()
    if named is None:
        return names
    where = whereabouts()
    if not hasattr(named, "__iter__") or isinstance(named, (str, torch.Tensor)):
        raise TypeError(
            f"{_ME}: named_parameters must be what model.named_parameters() returns, "
            f"not {type(named).__name__} ({where})."
        )
    pairs = list(named.items()) if isinstance(named, dict) else list(named)
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise ValueError(
                "named_parameters must be a sequence of (name, parameter) tuples, such as "
                f"model.named_parameters() returns; found {type(pair).__name__} ({where})."
            )
    given = [name for name, _ in pairs]
    if len(set(given)) < len(given):
        duplicates = sorted({name for name in given if given.count(name) > 1})
        raise ValueError(
            f"named_parameters has duplicate names: {', '.join(duplicates)} ({where})."
        )
    for name, (_, parameter) in zip(clean_names(given), pairs, strict=True):
        names.setdefault(parameter, name)
    unnamed = [p for p in parameters if p not in names]
    if unnamed:
        shapes = ", ".join(str(tuple(p.shape)) for p in unnamed[:5])
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(parameters)} "
            f"parameters (of shapes {shapes}{', ...' if len(unnamed) > 5 else ''}; {where})."
        )
    return names


def _groups(num_groups: Any, groups: Any, parameters: Sequence[torch.Tensor]) -> Any:
    """Return the numbers of explicit groups of parameters."""
    members = WeakIdKeyDictionary()
    where = whereabouts()
    if num_groups and groups is not None:
        raise ValueError(f"{_ME}: pass num_groups or groups, not both ({where}).")
    argument = "num_groups" if groups is None else "groups"
    groups = num_groups if groups is None else groups
    if not isinstance(groups, (list, tuple)):
        if argument == "groups" and (isinstance(groups, bool) or not hasattr(groups, "__index__")):
            raise ValueError(
                f"{_ME}: groups must be a number or a list of lists of parameters, "
                f"not {type(groups).__name__} ({where})."
            )
        count = checked_integer(groups, _ME, argument, 0)
        if count > len(parameters):
            raise ValueError(
                f"{_ME}: {argument} is {count}, but there are only {len(parameters)} parameters "
                f"({where})."
            )
        for i, parameter in enumerate(parameters if count else ()):
            members[parameter] = i * count // len(parameters)
        return members
    known = {id(parameter) for parameter in parameters}
    for number, group in enumerate(groups):
        if not isinstance(group, (list, tuple)):
            raise ValueError(
                f"{_ME}: groups must be a number or a list of lists of parameters; "
                f"groups[{number}] is {type(group).__name__} ({where})."
            )
        for position, parameter in enumerate(group):
            which = f"groups[{number}][{position}]"
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(
                    f"{_ME}: {which} must be a parameter, not {type(parameter).__name__} ({where})."
                )
            if id(parameter) not in known:
                raise ValueError(
                    f"{_ME}: {which}, of shape {tuple(parameter.shape)}, is not a parameter of the "
                    f"optimizer ({where})."
                )
            if parameter in members:
                raise ValueError(
                    f"{_ME}: {which}, of shape {tuple(parameter.shape)}, is in "
                    f"groups[{members[parameter]}] already ({where})."
                )
            members[parameter] = number
    return members
