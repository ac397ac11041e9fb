"""MuJoCo environments that compiled code can step; see :mod:`upgd.rl.stepping`.

Resets and saved states stay gymnasium's: both ways work on one simulator. What its classes make of
a step is written down once more in :mod:`upgd.rl.stepping`, for the environments of :data:`RULES`;
the numbers are read from the environment, and tests compare the two.

Two settings make MuJoCo's own step cheaper by 12% to 19% without changing a bit of its results:

* it looks for groups of bodies that touch each other, to solve each group by itself. A robot that
  is alone in its world is one tree of bodies, so there is one group and nothing to look for;
* the bindings let it read the clock some twenty times per substep, for a profile that nobody reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

RULES = {
    "half_cheetah_v5.HalfCheetahEnv": "planar",
    "hopper_v5.HopperEnv": "planar",
    "walker2d_v5.Walker2dEnv": "planar",
    "ant_v5.AntEnv": "ant",
}
"""By gymnasium's class, the rules for a step's observation, reward and end."""
_SPEED = {"half_cheetah_v5.HalfCheetahEnv": inf}
"""The largest speed in observations, where it is not 10."""


@dataclass(frozen=True)
class Simulator:
    """What :func:`upgd.rl.stepping.roll` takes of an environment, which must outlive it."""

    env: Any
    integers: NDArray[np.int64]
    numbers: NDArray[np.float64]
    arrays: tuple[NDArray[np.float64], ...]

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """MuJoCo without its timers; the callback is one of the whole process."""
        callback = ctypes.c_void_p.in_dll(_library(), "mjcb_time")
        before, callback.value = callback.value, None
        try:
            yield
        finally:
            callback.value = before


def simulator(env: Any) -> Simulator | None:
    """An environment without wrappers for compiled code; None if gymnasium must step it."""
    kind = type(env)
    name = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
    ours = kind.__module__.startswith("gymnasium.envs.mujoco.") and name in RULES
    if not ours or not _has_usual_observations(env) or env.model.ntree != 1:
        return None
    import mujoco

    try:
        functions = [_address("mj_step"), _address("mj_rnePostConstraint")]
        pointers = [env.model._address, env.data._address]
        _address("mjcb_time")
        no_islands = int(mujoco.mjtDisableBit.mjDSBL_ISLAND)
    except (AttributeError, ImportError, OSError):  # another build of MuJoCo
        return None
    from upgd.rl import stepping

    env.model.opt.disableflags |= no_islands
    which = {"planar": stepping.PLANAR, "ant": stepping.ANT}[RULES[name]]
    integers = np.array([*functions, *pointers, env.frame_skip, which], np.int64)
    data = env.data
    clipped = np.zeros(data.cfrc_ext.size)
    arrays = (data.ctrl, data.qpos, data.qvel, data.xpos, data.cfrc_ext, clipped)
    return Simulator(env, integers, _numbers(env, _SPEED.get(name, 10.0)), arrays)


def _has_usual_observations(env: Any) -> bool:
    """Whether an environment observes what it does by default."""
    return (
        getattr(env, "_exclude_current_positions_from_observation", False) is True
        and getattr(env, "_include_cfrc_ext_in_observation", True) is True
        and getattr(env, "_main_body", 1) == 1
    )


def _numbers(env: Any, speed: float) -> NDArray[np.float64]:
    from upgd.rl import stepping as s

    found = np.zeros(s.NUMBERS)
    found[s.FORWARD] = env._forward_reward_weight
    found[s.CONTROL] = env._ctrl_cost_weight
    found[s.HEALTHY] = getattr(env, "_healthy_reward", 0.0)
    found[s.CONTACT] = getattr(env, "_contact_cost_weight", 0.0)
    found[s.SECONDS] = env.dt
    found[s.TERMINATES] = getattr(env, "_terminate_when_unhealthy", False)
    everything = (-inf, inf)
    ranges = {
        s.LOW_Z: getattr(env, "_healthy_z_range", everything),
        s.LOW_ANGLE: getattr(env, "_healthy_angle_range", everything),
        s.LOW_STATE: getattr(env, "_healthy_state_range", everything),
        s.LOW_FORCE: getattr(env, "_contact_force_range", everything),
        s.LOW_SPEED: (-speed, speed),
    }
    for place, bounds in ranges.items():
        found[place : place + 2] = bounds
    return found


@cache
def _library() -> ctypes.CDLL:
    """MuJoCo, by way of the bindings that are linked to it."""
    import mujoco

    return ctypes.CDLL(mujoco._functions.__file__)


def _address(name: str) -> int:
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0
