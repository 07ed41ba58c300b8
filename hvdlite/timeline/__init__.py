"""The timeline: what each rank did when, on one clock, for Perfetto and chrome://tracing."""

from .recorder import Recorder, Span
from .session import Timeline

__all__ = ["Recorder", "Span", "Timeline"]
