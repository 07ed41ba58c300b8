"""Gradient tapes whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdlite import Average, ProcessSet, global_process_set
from hvdlite.transport.types import ReduceOp

from .compression import Compression, Compressor
from .partition import identity
from .reduction import GradientReducer

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

untraced: Any = tf.autograph.experimental.do_not_convert


class _Tape(tf.GradientTape):  # type: ignore[misc]
    """Mixed into the class of the tape that is wrapped; shares that tape's state."""

    # Outside of the shared state, of which the original knows nothing but its own.
    __slots__ = ("_hvdlite_local", "_hvdlite_reducer", "_hvdlite_scale_local")

    @untraced
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients of all ranks combined, in the structure of `sources`.

        Args:
            target, sources, output_gradients, unconnected_gradients: as of
                `tf.GradientTape.gradient`.
            use_generic_names: accepted for compatibility; names are generic.

        Returns:
            Gradients, None where there is none on any rank.

        Raises:
            MismatchError: the ranks' gradients differ in number, shape, type or kind (on every
                rank; inside a `tf.function` as an error of TensorFlow that quotes it).
        """
        # On a plain tape, so that a subclass's own `gradient` still comes first.
        own = super().gradient(
            target,
            sources,
            output_gradients=output_gradients,
            unconnected_gradients=unconnected_gradients,
        )
        flat_sources = tf.nest.flatten(sources)
        grads = _flatten_up_to(own, len(flat_sources))
        if not self._hvdlite_reducer.active:
            return own
        is_local = [identity(source) in self._hvdlite_local for source in flat_sources]
        everywhere = [i for i, local in enumerate(is_local) if not local]
        shared = [flat_sources[i] for i in everywhere]
        reduced = self._hvdlite_reducer([grads[i] for i in everywhere], shared)
        for i, grad in zip(everywhere, reduced, strict=True):
            grads[i] = grad
        if self._hvdlite_scale_local:
            size = self._hvdlite_reducer.process_set.size()
            grads = [
                _divided(grad, size) if local else grad
                for grad, local in zip(grads, is_local, strict=True)
            ]
        return tf.nest.pack_sequence_as(sources, grads)

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's Jacobian; it is not combined with those of others."""
        return self._plain().jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's Jacobians; they are not combined with those of others."""
        return self._plain().batch_jacobian(*args, **kwargs)

    def register_local_source(self, source: Any) -> None:
        """Have the gradient of a variable stay this rank's own."""
        self._hvdlite_local.add(identity(source))

    def _plain(self) -> tf.GradientTape:
        plain = tf.GradientTape.__new__(tf.GradientTape)
        plain.__dict__ = self.__dict__
        return plain


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape whose `gradient` averages or sums over the ranks.

    Args:
        gradtape: a tape, used already or not; it stays as it is, and shares its recording.
        device_dense, device_sparse: accepted for compatibility.
        compression: what makes gradients smaller on the wire.
        sparse_as_dense: whether IndexedSlices are made dense first.
        op: Average or Sum.
        gradient_predivide_factor: what to divide by before the sum, the rest of an average
            being divided after it.
        num_groups: old spelling of groups.
        groups: into how many buckets gradients go, or lists of variables that form one each;
            None leaves that to hvdlite.
        process_set: the ranks that take part. On others, gradients stay as they are.
        scale_local_gradients: whether gradients of local sources are divided by the number of
            ranks, as those of all others are in an average.

    Raises:
        TypeError: `gradtape` is no tape, or has been wrapped already.
        ValueError, NotImplementedError: an option makes no sense.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(
            "DistributedGradientTape wraps a tf.GradientTape, "
            f"not {type(gradtape).__module__}.{type(gradtape).__qualname__}."
        )
    if isinstance(gradtape, _Tape):
        raise TypeError("This tape is a DistributedGradientTape already: wrap a tape only once.")
    reducer = GradientReducer(
        op=op,
        compression=compression,
        groups=num_groups or None if groups is None else groups,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        # Tapes are made anew in every step, and no name would stay the same on all ranks.
        name=None,
    )
    cls = _class_for(type(gradtape))
    wrapped: Any = cls.__new__(cls)
    # Shared and not copied: the original may be what `with` is going to leave.
    wrapped.__dict__ = gradtape.__dict__
    wrapped._hvdlite_reducer = reducer
    wrapped._hvdlite_local = set()
    wrapped._hvdlite_scale_local = scale_local_gradients
    return wrapped


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that leaves the variables of some layers alone.

    Args:
        local_layers: a Keras layer or several, the gradients of whose trainable weights stay
            this rank's own. For the other arguments see `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    layers = local_layers if isinstance(local_layers, Iterable) else [local_layers]
    for layer in layers:
        if layer is None:
            continue
        if not hasattr(layer, "trainable_weights"):
            raise TypeError(f"local_layers must be Keras layers, not {type(layer).__name__}.")
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


_classes: dict[type, type] = {tf.GradientTape: _Tape}


def _class_for(base: type) -> type:
    if base not in _classes:
        _classes[base] = type(f"Distributed{base.__name__}", (_Tape, base), {"__slots__": ()})
    return _classes[base]


def _flatten_up_to(structure: Any, count: int) -> list[Any]:
    flat = tf.nest.flatten(structure)
    if len(flat) != count:
        raise TypeError(
            f"The tape returned {len(flat)} gradients for {count} sources; composite sources "
            "such as RaggedTensor cannot be reduced over ranks."
        )
    return flat


def _divided(grad: Any, size: int) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        values = grad.values / tf.cast(size, grad.values.dtype)
        return tf.IndexedSlices(values, grad.indices, grad.dense_shape)
    return grad / tf.cast(size, grad.dtype)
