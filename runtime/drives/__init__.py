"""Drives: where bytes lie, which drive reads which of them when, and what happens when one of them fails.

Knows bytes, knows no model. `scheduler.Scheduler` decides, without doing any I/O; events and actions are in `jobs`.
"""
