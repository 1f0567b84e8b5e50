"""Memory plan, prefill, decode and the record of a run."""

from runtime.generate.embedded import embedded_model
from runtime.generate.engine import Engine, Session, Step
from runtime.generate.plan import MemoryPlan

__all__ = ["Engine", "MemoryPlan", "Session", "Step", "embedded_model"]
