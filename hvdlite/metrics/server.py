"""Serves what an engine counts as Prometheus text; nothing is computed until somebody asks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..world import World

__all__ = ["COUNTERS", "GAUGES", "MetricsServer"]

COUNTERS = {
    "rounds": "Negotiation rounds.",
    "empty_rounds": "Rounds in which nothing became ready.",
    "responses": "Requests that were agreed on; a group counts once.",
    "cache_hits": "Responses that the cache settled without the coordinator.",
    "batches": "Transport operations.",
    "tensors": "Tensors that they carried.",
    "bytes": "Payload bytes that they carried.",
    "wire_bytes": "Bytes that an ideal algorithm would have had each rank send for them.",
    "packing_seconds": "Copying in and out of fusion buffers.",
    "moving_seconds": "Transport operations from start to end.",
    "waiting_seconds": "Callers blocked until a tensor was complete.",
    "negotiating_seconds": "Requests, from submission until all ranks had submitted them. "
    "The rank that is often the last has the smallest.",
}
GAUGES = {
    "queue_depth": "Requests that not all ranks have agreed on.",
    "in_flight": "Transport operations in progress.",
    "cache_size": "Responses in the caches.",
}

_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


class MetricsServer:
    """An HTTP server of one rank, in a thread of its own.

    Args:
        host: the address that it listens on.
        port: its port.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: the address cannot be used.
        OverflowError: there is no such port.
    """

    def __init__(self, host: str, port: int) -> None:
        import prometheus_client
        from prometheus_client import core

        self._core: Any = core
        self._world: World | None = None
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)
        self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        _servers.add(self)

    def watch(self, world: World) -> None:
        """Serve the metrics of an engine from now on."""
        world.engine.counters.negotiating_seconds = 0.0
        self._world = world

    def close(self) -> None:
        """Free the port."""
        self._world = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> Iterable[Any]:
        """Return nothing: there is no engine when the registry asks."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as they are now (for prometheus-client)."""
        world = self._world
        if world is None:
            return
        engine = world.engine
        statistics: Any = engine.statistics()
        rank = [str(world.rank)]
        for name, text in COUNTERS.items():
            is_ours = name == "negotiating_seconds"
            value = getattr(engine.counters if is_ours else statistics, name)
            family = self._core.CounterMetricFamily(f"hvdlite_{name}", text, labels=["rank"])
            family.add_metric(rank, value)
            yield family
        for name, text in GAUGES.items():
            family = self._core.GaugeMetricFamily(f"hvdlite_{name}", text, labels=["rank"])
            family.add_metric(rank, getattr(statistics, name))
            yield family
        info = {
            "rank": str(world.rank),
            "size": str(world.size),
            "local_rank": str(world.local_rank),
            "local_size": str(world.local_size),
            "host": world.hosts[world.rank].split()[0],
        }
        yield self._core.InfoMetricFamily("hvdlite_job", "The rank and its job.", value=info)


def _leave_port_to_parent() -> None:
    # Workers that outlive the rank must not keep its port from the next job.
    for server in _servers:
        server._server.socket.close()


os.register_at_fork(after_in_child=_leave_port_to_parent)
