"""Reinforcement learning: PPO with any optimizer of the registry, many agents at once.

Needs ``pip install "upgd[rl]"``.
"""

from upgd.rl.agents import AgentGroup
from upgd.rl.environments import MissingExtraError, RLError, environment_id
from upgd.rl.ppo import Settings, learner
from upgd.rl.rollouts import Episode
from upgd.rl.workers import Record

__all__ = [
    "AgentGroup",
    "Episode",
    "MissingExtraError",
    "RLError",
    "Record",
    "Settings",
    "environment_id",
    "learner",
]
