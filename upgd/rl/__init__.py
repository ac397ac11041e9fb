"""Reinforcement learning: PPO with any optimizer of the registry, many agents at once.

Needs the extra ``rl``: in a clone ``pip install ".[rl]"``.

=====================  ===================================================================
``ppo.py``             the settings and the algorithm, on tensors of many agents; runs on CUDA
``compiled.py``        the same for one agent on a core; runs on CPU; ``kernels.py`` is compiled
``network.py``         an agent's parameters: initial values and layout
``environments.py``    environments by name, without wrappers, in states that can be saved
``simulators.py``      environments that compiled code can step; ``stepping.py`` is compiled
``rollouts.py``        an agent in its environment: normalising, acting, counting episodes
``workers.py``         agents in worker processes, and their record of an iteration
``agents.py``          :class:`AgentGroup`, the interface for everything else
``diagnostics.py``     diagnostics of networks
=====================  ===================================================================
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
