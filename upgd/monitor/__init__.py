"""A plasticity monitor for any training loop, and what the laboratory measures of networks."""

from upgd.monitor.monitor import Monitor

__all__ = ["Monitor"]
