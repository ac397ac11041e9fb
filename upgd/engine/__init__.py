"""Engines run learners on streams."""

from upgd.engine.eager import Divergence, EagerRun, Setting

__all__ = ["Divergence", "EagerRun", "Setting"]
