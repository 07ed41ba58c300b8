"""Live metrics of a running job: for Prometheus, and for `hvdlite top`."""

from .server import MetricsServer

__all__ = ["MetricsServer"]
