"""The class that a distributed Keras optimizer has: its own, with a reduction put in front.

An instance's class is changed, not the instance: slots, callable learning rates and whatever
else it holds stay what they are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import keras

from hvdlite import Average, ProcessSet, global_process_set
from hvdlite.transport.types import ReduceOp

from .backends import backend

__all__ = ["Distributed", "Options", "State", "distribute", "run", "state_of"]

_STATE = "_hvdlite_state"


@dataclass(frozen=True)
class Options:
    """What the class of a distributed optimizer knows, and its instances have in common.

    Attributes:
        passes: how many calls of `apply` accumulate gradients before they are reduced.
        average_passes: whether to divide what they accumulate by their number.
        number_of_groups: how many buckets to form; None leaves that to the reducer.
        scale_local: whether gradients that are not reduced are divided by the number of ranks.
    """

    compression: Any
    op: ReduceOp = Average
    sparse_as_dense: bool = False
    gradient_predivide_factor: float = 1.0
    passes: int = 1
    average_passes: bool = False
    number_of_groups: int | None = None
    process_set: ProcessSet | None = global_process_set
    scale_local: bool = True


class State:
    """What one distributed optimizer needs of its own.

    Args:
        options: of its class.
        label: name of its reductions, the same on all ranks.
        groups: lists of variables to reduce together, in place of a number of groups.
    """

    def __init__(self, options: Options, label: str, groups: Any = None) -> None:
        self.options = options
        self.label = label
        self.groups = options.number_of_groups if groups is None else groups
        self.reducer = backend().reducer(options, self.groups, label)
        self.accumulator = backend().accumulator(options.passes, options.average_passes)
        self.local: list[Any] = []
        self.suspended = False
        self.deferred_for: Sequence[Any] | None = None
        self.deferring = False
        self.has_reduced = False

    def is_local(self, variable: Any) -> bool:
        """Whether the variable's gradient stays on its rank."""
        return any(variable is other for other in self.local)

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Let `apply` take gradients that somebody else has reduced."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def reduce(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients of all ranks combined.

        Args:
            optimizer: what was built for these variables, and perhaps others.
            grads: gradients or None, of some of its variables.
            variables: which ones.
        """
        # Gradients of some of the variables keep the places, and with them the names, that
        # they have among all: a call for a part of a model is no other set of tensors.
        known = list(optimizer._trainable_variables)
        spread: list[Any] = [None] * len(known)
        places = _places(optimizer, variables)
        local = [self.is_local(variable) for variable in variables]
        for place, grad, stays in zip(places, grads, local, strict=True):
            spread[place] = None if stays else grad
        spread = self.reducer(spread, known)
        factor = 1.0
        process_set = self.options.process_set
        if self.local and self.options.scale_local and process_set.included():
            factor = 1.0 / process_set.size()
        return [
            (backend().scaled(grad, factor) if stays and grad is not None else grad)
            if stays
            else spread[place]
            for place, grad, stays in zip(places, grads, local, strict=True)
        ]


class Distributed:
    """Comes before the optimizer's own class."""

    _hvdlite_options: ClassVar[Options]

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce gradients over the ranks, then update the variables with them."""
        return run(self, self, grads, trainable_variables, super().apply)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        state = state_of(self)
        if not state.deferring:
            return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        state.deferred_for = list(trainable_variables)
        try:
            return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        finally:
            state.deferred_for = None

    def _clip_gradients(self, grads: Any) -> Any:
        # What Keras does first with gradients that it has accumulated.
        state = state_of(self)
        if state.deferred_for is not None:
            grads = state.reduce(self, list(grads), state.deferred_for)
            state.has_reduced = True
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def register_local_var(self, variable: Any) -> None:
        """Keep a variable's gradient on its rank: it is not reduced."""
        state = state_of(self)
        if not state.is_local(variable):
            state.local.append(variable)

    def __reduce__(self) -> Any:
        state = state_of(self)
        if state.options.process_set is not global_process_set or state.local:
            raise TypeError(
                "An optimizer that is distributed over a process set, or has local variables, "
                "cannot be copied or pickled: copy the plain optimizer, and distribute the copy."
            )
        if isinstance(state.groups, (list, tuple)):
            raise TypeError(
                "An optimizer that is distributed with groups of variables cannot be copied or "
                "pickled; a number of groups can."
            )
        make, arguments, *_ = super().__reduce__()  # type: ignore[misc]
        if getattr(make, "__self__", None) is type(self):
            make = getattr(type(self).__bases__[1], make.__name__)  # pickle finds plain ones only
        return _restored, (make, arguments, replace(state.options, process_set=None), state.label)


def run(
    owner: Any,
    optimizer: Any,
    grads: Any,
    variables: Any,
    apply: Callable[[list[Any], Any], Any],
) -> Any:
    """Reduce gradients as `owner` is told to, and hand them to `apply`.

    Args:
        owner: the distributed optimizer.
        optimizer: the one that updates: the same, or one that the owner is the inner one of.
        grads: gradients or None.
        variables: their variables; None for those that the optimizer was built with.
        apply: the optimizer's own `apply`.
    """
    state = state_of(owner)
    grads = list(grads)
    if state.suspended or not grads:
        return apply(grads, variables)
    backend().refuse_strategies()
    if variables is None:
        if not optimizer.built:
            return apply(grads, None)  # which raises
        variables = optimizer._trainable_variables
    variables = list(variables)
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    if len(grads) != len(variables):
        raise ValueError(
            f"{len(grads)} gradients were passed for {len(variables)} variables of the optimizer."
        )

    def reduced(grads: list[Any]) -> Any:
        with state.suspend():
            return apply(state.reduce(optimizer, grads, variables), variables)

    if state.options.passes > 1:
        return state.accumulator(_places(optimizer, variables), grads, reduced)
    # Within an optimizer that looks at gradients before this one accumulates them, they have
    # to be reduced first, or ranks come to different conclusions about them.
    if owner is optimizer and owner.gradient_accumulation_steps:
        return _deferred(state, owner, grads, variables, apply)
    return reduced(grads)


def _deferred(state: State, owner: Any, grads: list[Any], variables: list[Any], apply: Any) -> Any:
    """Let Keras accumulate gradients on every rank and reduce what comes of that."""
    state.deferring, state.has_reduced = True, False
    try:
        with state.suspend():
            result = apply(grads, variables)
    finally:
        state.deferring = False
    if not state.has_reduced and backend().has_updated(owner):
        raise RuntimeError(
            f"{type(owner).__name__} with gradient_accumulation_steps has updated the model "
            "with gradients of one rank only, since it does not call Keras's own clipping. "
            "Use backward_passes_per_step of DistributedOptimizer instead."
        )
    return result


def _places(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    try:
        return [optimizer._get_variable_index(variable) for variable in variables]
    except KeyError:
        known = {id(variable) for variable in optimizer._trainable_variables}
        unknown = [v for v in variables if id(v) not in known]
        names = ", ".join(str(getattr(v, "path", v)) for v in unknown[:5])
        raise ValueError(
            f"The optimizer {optimizer.name!r} was not built for these variables: {names}. It "
            "can only be called for the variables that it was built with."
        ) from None


def state_of(optimizer: Any) -> State:
    """Return the state of a distributed optimizer.

    One that was made from its class (by `from_config`, say) gets it when it is first used, so
    that one that a single rank makes does not shift the names of those that all ranks use.
    """
    state = vars(optimizer).get(_STATE)
    if state is None:
        options = type(optimizer)._hvdlite_options
        _set_state(optimizer, State(options, _copy_label("DistributedOptimizer")))
    return vars(optimizer)[_STATE]


def _set_state(optimizer: Any, state: State) -> None:
    # Around Keras's __setattr__, which would track it and save it along with the optimizer.
    vars(optimizer)[_STATE] = state


def distribute(optimizer: Any, options: Options, label: str, groups: Any = None) -> None:
    """Make a distributed optimizer of a plain one, in place."""
    state = State(options, label, groups)
    changed = _class_for(type(optimizer), options)
    object.__setattr__(optimizer, "__class__", changed)
    _set_state(optimizer, state)


@functools.cache
def _class_for(base: type, options: Options) -> type:
    """Return a class that goes by the name of `base` and reduces gradients first."""
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_hvdlite_options": options,
    }
    changed = type(base.__name__, (Distributed, base), names)
    _pass_on_names(base, changed)
    return changed


def _pass_on_names(base: type, changed: type) -> None:
    """Save what the class makes as what the plain class makes, for loading anywhere.

    The reverse tables, from name to class, are left alone: a loaded optimizer is a plain one.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from keras.src import api_export
        from keras.src.saving import object_registration

        for table in (
            api_export.REGISTERED_OBJS_TO_NAMES,
            object_registration.GLOBAL_CUSTOM_NAMES,
        ):
            if base in table:
                table[changed] = table[base]


def _restored(make: Any, arguments: Any, options: Options, label: str) -> Any:
    """Put a copied or unpickled optimizer together."""
    optimizer = make(*arguments)
    options = replace(options, process_set=global_process_set)
    distribute(optimizer, options, _copy_label(label.partition(".copy.")[0]))
    return optimizer


_copies: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def _copy_label(label: str) -> str:
    return f"{label}.copy.{next(_copies[label])}"
