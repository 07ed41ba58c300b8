"""All buckets of one optimizer, and its sparse gradients, which no bucket can hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hvdlite import Handle

from .buckets import Bucket, Reduction, Slot, distribute
from .compression import NoneCompressor
from .compressors import GradientCompressor
from .names import Label
from .plan import agree_on_kinds, agree_on_places
from .sparse import SparsePart, exchange_sparse

__all__ = ["BucketSet"]


class BucketSet:
    """Assigns parameters to buckets and reduces what they hold.

    Args:
        label: identifies the optimizer across ranks.
        groups: numbers of the explicit groups of parameters.
        reduction: how to combine gradients.
        bucket_bytes: size of a bucket, and of the first one.
    """

    def __init__(
        self, label: Label, groups: Any, reduction: Reduction, bucket_bytes: tuple[int, int]
    ) -> None:
        self.label = label
        self.groups = groups
        self.bucket_bytes = bucket_bytes
        self._reduction = reduction
        self._buckets: list[Bucket] = []
        self._sparse: list[Slot] = []
        # Never used twice: after an error the engine may still hold buckets of the old names.
        self._serial = itertools.count()

    def add(self, slots: Sequence[Slot]) -> None:
        """Agree with the other ranks on places for parameters that have none yet.

        Args:
            slots: in the order in which their gradients were seen here.
        """
        label = str(self.label)
        agreed = agree_on_places(slots, self.groups, f"{label}.plan", self._reduction)
        by_name = {place.name: slot for slot, place in agreed}
        self._sparse += [slot for slot, _ in agreed if slot.sparse_dim]
        dense = [place for slot, place in agreed if not slot.sparse_dim]
        for places in distribute(dense, *self.bucket_bytes):
            name = f"{label}.bucket.{next(self._serial)}"
            members = [by_name[place.name] for place in places]
            self._buckets.append(Bucket(name, members, places, self._reduction))

    def reduce(self) -> None:
        """Complete all buckets with what is there, and wait until everything is reduced."""
        for bucket in self._buckets:
            if bucket.handle is None:
                bucket.submit()
        handle = self._exchange(self._sparse, "sparse") if self._sparse else None
        for bucket in self._buckets:
            bucket.advance()
        surprises = [pair for bucket in self._buckets for pair in bucket.finish()]
        if handle is not None:
            for slot, total in zip(self._sparse, handle.wait(), strict=True):
                slot.parameter.grad = total
        if surprises:
            self._reduce_surprises(surprises)

    def _reduce_surprises(self, surprises: Sequence[tuple[Slot, bool]]) -> None:
        """Reduce gradients that turned out to be sparse, here or elsewhere, in this step."""
        slots = [slot for slot, _ in surprises]
        # What is dense here is in the bucket already, and must not be sent a second time.
        for slot in slots:
            if not slot.holds_sparse:
                slot.parameter.grad = None
        name = f"{self.label}.surprise"
        agree_on_kinds(slots, f"{name}.kinds", self._reduction.process_set)
        totals = self._exchange(slots, "surprise").wait()
        for (slot, dense_too), total in zip(surprises, totals, strict=True):
            # From now on outside the bucket, where the place stays empty.
            slot.parameter.grad = slot.view.to(total.device) + total if dense_too else total
        self._sparse += slots

    def _exchange(self, slots: Sequence[Slot], what: str) -> Handle:
        parts = []
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is not None and gradient.layout is not torch.sparse_coo:
                gradient = gradient.to_sparse(slot.sparse_dim)
            parts.append(SparsePart(gradient, slot.parameter, slot.sparse_dim))
        reduction = self._reduction
        compression = reduction.compression
        if isinstance(compression, GradientCompressor):
            compression = NoneCompressor  # sparse gradients are small as they are
        return exchange_sparse(
            parts,
            f"{self.label}.{what}",
            reduction.op,
            reduction.process_set,
            compression,
        )

    def drain(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for bucket in self._buckets:
            if bucket.handle is not None:
                with suppress(Exception):
                    bucket.handle.wait()

    def forget(self) -> None:
        """Give up all buckets, which may still be in the hands of the engine."""
        for slot in itertools.chain(self._sparse, *(bucket.slots for bucket in self._buckets)):
            slot.bucket = slot.view = None
            slot.address = slot.sparse_dim = 0
        self._buckets, self._sparse = [], []
