"""When gradients are reduced: hooks on parameters begin it, `step()` ends it."""

from __future__ import annotations

import enum
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

import hvdlite
from hvdlite.world import engine

from .arguments import checked_integer, whereabouts
from .bucket_set import BucketSet
from .buckets import Bucket, DiscardedStepError
from .closures import is_reduced, reduced
from .eager import eager
from .names import Label
from .passes import BackwardPasses
from .progress import announce
from .slots import Slot, refuse_changes
from .step_reducer import Options, StepReducer

__all__ = ["Reducer"]

_owners: Any = WeakIdKeyDictionary()
"""Which reducer, by weak reference, a parameter's gradient belongs to."""


class _Settled(enum.Enum):
    """Why there is nothing to reduce."""

    BY_STEP = enum.auto()
    BY_USER = enum.auto()


class Reducer(StepReducer):
    """Reduces the gradients of one optimizer.

    A step goes through these states: gradients accumulate, and full buckets get under way;
    `settle()` completes the rest and waits; then nothing happens until fresh gradients come,
    `zero_grad()` is called or the optimizer has stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, label: Label, options: Options) -> None:
        super().__init__(optimizer, label, options)
        self._buckets = BucketSet(label, self.groups, self.reduction, self.bucket_bytes)
        self._slots: dict[int, Slot] = {}
        self._observed: list[Slot] = []
        self._passes = BackwardPasses()
        self._hooks: list[Any] = []
        self._completed = 0
        self._fresh = False
        self._settled: _Settled | None = None
        self._skipping = False
        self._lost = 0
        # Threads that wait for other optimizers advance this one. Not reentrant: nor may this
        # thread advance it again, in the midst of waiting for the agreement.
        self._lock = threading.Lock()
        self._engine: weakref.ref[Any] | None = None
        self.active = False
        self._meet_engine()
        if self.active:
            self._adopt(optimizer)
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def _meet_engine(self) -> None:
        """Begin anew where hvdlite has been shut down and initialised again."""
        current = engine()
        if self._engine is None or self._engine() is not current:
            self._forget()
            self._engine = weakref.ref(current)
            process_set = self.reduction.process_set
            self.active = process_set.included() and process_set.size() > 1

    # -- parameters ---------------------------------------------------------------------

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Take on parameters that are new or have begun to require gradients."""
        for g, group in enumerate(optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                if id(parameter) in self._slots or not parameter.requires_grad:
                    continue
                name = self.names.setdefault(parameter, f"group.{g}.parameter.{p}")
                slot = Slot(name, parameter)
                self._slots[id(parameter)] = slot
                self._claim(slot)

    def _claim(self, slot: Slot) -> None:
        previous = _owners.get(slot.parameter)
        previous = previous and previous()
        if previous is not None and previous is not self:
            previous._release(slot.parameter)
        reference = weakref.ref(self)
        _owners[slot.parameter] = reference

        # The hook must not keep the reducer alive: parameters outlive optimizers.
        def accumulated(_: torch.Tensor) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._accumulated(slot)

        parameter: Any = slot.parameter
        self._hooks.append(parameter.register_post_accumulate_grad_hook(accumulated))

    def _release(self, parameter: torch.Tensor) -> None:
        self._lost += 1
        for hook in self._hooks:
            hook.remove()

    # -- accumulation -------------------------------------------------------------------

    @eager
    def _accumulated(self, slot: Slot) -> None:
        number = self._passes.current(self._pass_ended)
        with self._lock:
            self._account(slot, number)
            slot.observe()

    def _account(self, slot: Slot, number: int) -> None:
        bucket = slot.bucket
        if slot.sparse_dim:
            under_way = self._buckets.has_sent_sparse
        else:
            under_way = bucket is not None and bucket.handle is not None
        if number == slot.pass_number and slot.passes:
            if not slot.recurs and under_way:
                raise RuntimeError(
                    f"{whereabouts()}: the gradient of {slot.name!r} came a second time in "
                    "one backward pass, when its bucket was under way already. Reentrant "
                    "checkpointing of a parameter that is used several times has to be there "
                    "from the first step on; or use checkpoint(..., use_reentrant=False)."
                )
            slot.recurs = True
            is_dense = not (slot.sparse_dim or slot.holds_sparse)
            if bucket is not None and bucket.takes_early and is_dense:
                bucket.take(slot)
            return
        if slot.passes >= self.passes_per_step:
            raise AssertionError(
                f"{whereabouts()}: the gradient of {slot.name!r} was computed more than "
                f"backward_passes_per_step={self.passes_per_step} times before step() or "
                "synchronize(). Call one of them first, or raise backward_passes_per_step; "
                "after a backward pass that failed call optimizer.zero_grad()."
            )
        if not self._fresh:
            self._meet_engine()
            bucket = slot.bucket
        slot.pass_number = number
        slot.passes += 1
        self._fresh = True
        self._settled = None
        if slot.passes == 1 and slot.bucket is None and not slot.sparse_dim:
            self._observed.append(slot)
        if slot.passes == self.passes_per_step:
            self._completed += 1
        if under_way:
            raise RuntimeError(
                f"{whereabouts()}: the gradient of {slot.name!r} came when its bucket was "
                "under way already: requires_grad changed between backward passes of one step."
            )
        if slot.sparse_dim and slot.passes == self.passes_per_step:
            self._buckets.submit_sparse_if_complete(self.passes_per_step)
        if bucket is None or slot.sparse_dim or slot.holds_sparse:
            return
        if bucket.takes_early:
            bucket.take(slot)
        if slot.passes == self.passes_per_step:
            bucket.ready += 1
            if bucket.is_complete():
                self._buckets.submit(bucket)

    def _pass_ended(self) -> None:
        """Begin to agree on buckets as early as this rank knows what it has."""
        with self._lock:
            if self._completed and self.active and not self._buckets.is_agreeing:
                self._propose()
        self.advance()

    def _propose(self) -> None:
        slots = [s for s in self._slots.values() if s.bucket is None and not s.sparse_dim]
        if slots:
            self._buckets.propose(self._in_observed_order(slots))
            announce(self)

    @torch.inference_mode(False)  # of whoever waits: buckets outlast it
    def advance(self) -> bool:
        """Submit buckets that have been agreed upon, and return whether others have not."""
        if self._lock.acquire(blocking=False):
            try:
                self._submit_complete(self._buckets.agree_if_ready())
            finally:
                self._lock.release()
        return self._buckets.is_agreeing

    def _submit_complete(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.ready = sum(
                slot.passes == self.passes_per_step and not slot.sparse_dim for slot in bucket.slots
            )
            if bucket.is_complete():
                self._buckets.submit(bucket)
        self._buckets.submit_sparse_if_complete(self.passes_per_step)

    @eager
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients, as the optimizer itself would.

        After a backward pass that ended in an error this discards the step, of which parts may
        have been reduced already: all ranks have to call it then.

        Raises:
            AssertionError: gradients of the last backward pass are still to be reduced.
        """
        if self._completed and not self._passes.failed:
            raise AssertionError(
                f"{whereabouts()}: zero_grad() was called after backward() and before "
                "step() or synchronize(), while gradients are being reduced. Call it before "
                "backward(), or call synchronize() first."
            )
        if self._completed:
            with self._lock:
                self._discard()
        self.reset_gradients(*args, **kwargs)
        with self._lock:
            self._begin_anew()
        self._settled = None

    def _discard(self) -> None:
        """Give up a step whose backward pass has failed, as all ranks have to."""
        try:
            self._buckets.discard()
        except BaseException:
            self._buckets.drain()
            self._forget()
            raise

    def _begin_anew(self) -> None:
        for slot in self._slots.values():
            slot.forget()
        self._passes.forget()
        self._completed = 0
        self._fresh = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes accumulate (as a sum) before gradients are reduced.

        Raises:
            TypeError: `passes` is not a whole number.
            ValueError: `passes` is not positive.
            RuntimeError: gradients are being reduced.
        """
        passes = checked_integer(passes, "set_backward_passes_per_step", "passes", 1)
        if self._completed:
            raise RuntimeError(
                f"{whereabouts()}: backward_passes_per_step cannot change while gradients are "
                "being reduced: call it before backward(), or after step() or synchronize()."
            )
        self.passes_per_step = passes
        for slot in self._slots.values():
            slot.passes = 0

    # -- steps --------------------------------------------------------------------------

    @eager
    def synchronize(self) -> None:
        """Reduce what has not been reduced yet, and wait until all gradients are.

        Raises:
            MismatchError: the ranks' parameters differ (on every rank).
            HvdliteInternalError: a peer left, or the engine was shut down.
        """
        self.settle()
        self._settled = _Settled.BY_USER

    @eager
    def settle(self) -> None:
        """Do what `synchronize()` does, on behalf of a step."""
        if self._settled is None:
            with self._lock:
                self._reduce()
            self._settled = _Settled.BY_STEP

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step()` use gradients as they are: for after `synchronize()`."""
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    @eager
    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reduce gradients, or have the closure reduce them after each evaluation."""
        if self._skipping:
            if self._fresh:
                raise RuntimeError(
                    f"{whereabouts()}: step() was called within skip_synchronize(), but the "
                    "gradients of the last backward pass have not been reduced: call "
                    "synchronize() first."
                )
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None and callable(closure):
            if not self.active or is_reduced(closure):
                return None
            closure = reduced(closure, self.settle, f"{self.label}.loss", self.reduction)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": closure}
            return (args[0], closure, *args[2:]), kwargs
        if self._settled is _Settled.BY_USER:
            warnings.warn(
                "step() was called after synchronize() without skip_synchronize(): the "
                "gradients are not reduced a second time. Write "
                "`with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=3,
            )
        self.settle()
        return None

    def after_step(self, *_: Any) -> None:
        """Note that the gradients have served their purpose."""
        self._settled = None

    # -- reduction ----------------------------------------------------------------------

    def _reduce(self) -> None:
        if self._lost:
            raise RuntimeError(
                f"{whereabouts()}: {self._lost} parameter(s) of this optimizer have been passed "
                "to another DistributedOptimizer since: only one can reduce a gradient."
            )
        if self.active or hvdlite.is_initialized():
            self._meet_engine()
        if not self.active:
            return
        changed = [slot for slot in self._slots.values() if slot.inspect()]
        try:
            self._adopt(self.optimizer)
            if self._buckets.is_agreeing:
                self._submit_complete(self._buckets.agree())
            self._propose()
            if self._buckets.is_agreeing:
                self._buckets.agree()
            self._buckets.reduce()
        except DiscardedStepError:
            raise
        except BaseException as error:
            if isinstance(error, Exception):  # and nobody is impatient
                self._buckets.drain()
            self._forget()
            raise
        else:
            # Only now: other ranks, which may have changed nothing, have what they wait for.
            refuse_changes(changed)
        finally:
            self._begin_anew()

    def _in_observed_order(self, slots: Sequence[Slot]) -> list[Slot]:
        """Sort by when gradients came; those that didn't, last registered first."""
        times = {id(slot): time for time, slot in enumerate(self._observed)}
        self._observed = []
        backwards = slots[::-1]
        return sorted(backwards, key=lambda slot: times.get(id(slot), len(times)))

    def _forget(self) -> None:
        self._buckets.forget()
        self._observed = []


def _remove(hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
