"""Checkpoints in the released format: headers, inventory, MXFP4, and reading by name or by expert."""

from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.headers import TensorSpan, read_header
from runtime.checkpoint.inventory import TensorSpec, inventory
from runtime.checkpoint.mxfp4 import PackedExpert

__all__ = ["Checkpoint", "PackedExpert", "TensorSpan", "TensorSpec", "inventory", "read_header"]
