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
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from upgd.rl.stepping import Arrays

RULES = {
    "half_cheetah_v5.HalfCheetahEnv": "planar",
    "hopper_v5.HopperEnv": "planar",
    "walker2d_v5.Walker2dEnv": "planar",
    "ant_v5.AntEnv": "ant",
    "humanoid_v5.HumanoidEnv": "humanoid",
    "humanoidstandup_v5.HumanoidStandupEnv": "standup",
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
    arrays: Arrays

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
    if not ours or not _is_usual(env, RULES[name]) or env.model.ntree != 1:
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
    which = stepping.KINDS.index(RULES[name])
    integers = np.array([*functions, *pointers, env.frame_skip, which], np.int64)
    numbers = _numbers(env, RULES[name], _SPEED.get(name, 10.0))
    return Simulator(env, integers, numbers, _arrays(env))


def _is_usual(env: Any, rules: str) -> bool:
    """Whether an environment observes what it does by default, and numpy's sums are plain."""
    from upgd.rl.stepping import SUMMED

    model, bodies = env.model, env.model.nbody - 1
    size = model.nq + model.nv
    if rules == "planar":
        size -= 1
    elif rules == "ant":
        size += 6 * bodies - 2
    else:
        size += (10 + 6 + 6) * bodies + max(model.nv - 6, 0) - 2
    return (
        getattr(env, "_exclude_current_positions_from_observation", False) is True
        and env.observation_space.shape == (size,)
        and getattr(env, "_main_body", 1) == 1
        and max(model.nu, env.data.cfrc_ext.size) <= SUMMED
    )


def _arrays(env: Any) -> Arrays:
    from upgd.rl.stepping import Arrays

    data, model = env.data, env.model
    return Arrays(
        control=data.ctrl,
        position=data.qpos,
        velocity=data.qvel,
        places=data.xpos.reshape(-1),
        centres=data.xipos.reshape(-1),
        masses=model.body_mass,
        inertias=data.cinert.reshape(-1),
        speeds=data.cvel.reshape(-1),
        actuators=data.qfrc_actuator,
        forces=data.cfrc_ext.reshape(-1),
        clipped=np.zeros(data.cfrc_ext.size),
    )


def _numbers(env: Any, rules: str, speed: float) -> NDArray[np.float64]:
    from upgd.rl import stepping as s

    cost = "impact" if rules == "standup" else "contact"
    found = np.zeros(s.NUMBERS)
    found[s.FORWARD] = getattr(env, "_forward_reward_weight", 0.0)
    found[s.CONTROL] = env._ctrl_cost_weight
    found[s.HEALTHY] = getattr(env, "_healthy_reward", 0.0)
    found[s.CONTACT] = getattr(env, f"_{cost}_cost_weight", 0.0)
    found[s.SECONDS] = env.model.opt.timestep if rules == "standup" else env.dt
    found[s.TERMINATES] = getattr(env, "_terminate_when_unhealthy", False)
    found[s.MASS] = env.model.body_mass.sum()
    found[s.FUSED] = _is_fused(type(env).__module__)
    everything = (-inf, inf)
    ranges = {
        s.LOW_Z: getattr(env, "_healthy_z_range", everything),
        s.LOW_ANGLE: getattr(env, "_healthy_angle_range", everything),
        s.LOW_STATE: getattr(env, "_healthy_state_range", everything),
        s.LOW_FORCE: getattr(env, "_contact_force_range", everything),
        s.LOW_COST: getattr(env, f"_{cost}_cost_range", everything),
        s.LOW_SPEED: (-speed, speed),
    }
    for place, bounds in ranges.items():
        found[place : place + 2] = bounds
    return found


def _is_fused(module: str) -> bool:
    """Whether a module's centre of mass adds products before they are rounded.

    Some do so with some builds of numpy, those for ARM among them.
    """
    centre = getattr(sys.modules[module], "mass_center", None)
    if centre is None:
        return False
    a = 1 + 2**-30  # a² is 1 + 2⁻²⁹ + 2⁻⁶⁰, and 1 + 2⁻²⁹ if it is rounded
    model = SimpleNamespace(body_mass=np.array([1.0, a]))
    places = np.array([[-(1 + 2**-29), 0, 0], [a, 0, 0]])
    return bool(centre(model, SimpleNamespace(xipos=places))[0])


@cache
def _library() -> ctypes.CDLL:
    """MuJoCo, by way of the bindings that are linked to it."""
    import mujoco

    return ctypes.CDLL(mujoco._functions.__file__)


def _address(name: str) -> int:
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0
