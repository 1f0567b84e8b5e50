"""Memory plan, prefill, decode and the record of a run."""

from runtime.generate.embedded import embedded_model
from runtime.generate.engine import Engine, Session, Step
from runtime.generate.plan import MemoryPlan
from runtime.generate.sampling import Sampler, greedy
from runtime.generate.snapshots import Disk, Snapshot, Snapshots
from runtime.generate.spill import Spill

__all__ = [
    "Disk",
    "Engine",
    "MemoryPlan",
    "Sampler",
    "Session",
    "Snapshot",
    "Snapshots",
    "Spill",
    "Step",
    "embedded_model",
    "greedy",
]
