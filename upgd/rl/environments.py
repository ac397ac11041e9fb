"""Environments of gymnasium, by name, in a state that can be saved.

Its wrappers for time limits, episode statistics and normalisation are slow; their work is done here
and in :mod:`upgd.rl.rollouts`, and tests compare the two.
"""

from __future__ import annotations

import difflib
import importlib
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upgd.extras import install

_log = logging.getLogger(__name__)
_MISSING = f"reinforcement learning needs {{}}: {install('rl')}"
# Quantities that MuJoCo derives at the beginning of a step and environments read after it.
_DERIVED = re.compile(
    r"^(x|ximat$|geom_x|site_x|cam_x|light_x|c(inert|vel|acc|rb|dof|dof_dot|frc_ext|frc_int)$|"
    r"subtree_|qfrc_|qacc|actuator_|act_dot$|sensordata$|energy$)"
)

SAVED_AFTER, COMPARED = 5, 20
"""Steps before and after saving, to test whether the saved state is complete."""


class RLError(ValueError):
    """An experiment cannot be run; the message is one line."""


class MissingExtraError(RLError, ImportError):
    """A package of the extra ``rl`` is not installed."""


def _gymnasium() -> Any:
    try:
        import gymnasium
        import numba  # noqa: F401
    except ImportError as error:
        missing = (error.name or "gymnasium").split(".")[0]
        raise MissingExtraError(_MISSING.format(missing)) from error
    return gymnasium


def environment_id(name: str) -> str:
    """The full name of an environment; without a version, the newest that is installed.

    A module that registers it may be given before a colon: ``my_package:MyEnv``. Raises
    :class:`RLError` if it is unknown.
    """
    known = _gymnasium().registry
    module, colon, rest = name.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module may raise anything
            raise RLError(f"module {module!r} cannot be imported: {_reason(error)}") from error
        return f"{module}:{environment_id(rest)}"
    if name in known:
        return name
    versions = {i: int(i.rpartition("-v")[2]) for i in known if i.rpartition("-v")[0] == name}
    if versions:
        return str(max(versions, key=lambda i: versions[i]))
    stems = {str(i).rpartition("-v")[0]: str(i) for i in known}
    by_case = {stem.lower(): stem for stem in stems}
    stem = name.rpartition("-v")[0] or name
    close = difflib.get_close_matches(stem.lower(), by_case, n=1)
    hint = f"; did you mean {by_case[close[0]]!r}?" if close else ""
    raise RLError(f"unknown environment {name!r}{hint}")


def newest_environments() -> list[str]:
    """The newest version of every environment that gymnasium knows; not all can be made."""
    names = [str(name) for name in _gymnasium().registry]
    return sorted({environment_id(name.rpartition("-v")[0] or name) for name in names})


@dataclass(frozen=True)
class Spaces:
    """The sizes and bounds of an environment's spaces, and its steps per episode, or 0."""

    name: str
    observations: int
    actions: int
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    limit: int


def make(name: str) -> tuple[Any, Spaces]:
    """An environment without wrappers, and its spaces.

    Raises:
        RLError: It cannot be made or saved, or is not one of continuous control.
    """
    env, spaces = _make(name)
    _check_saving(spaces.name)
    return env, spaces


def _make(name: str) -> tuple[Any, Spaces]:
    gymnasium, full = _gymnasium(), environment_id(name)
    try:
        _quieten()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of an old version
            wrapped = gymnasium.make(full)
    except Exception as error:  # an environment may raise anything
        lacks = isinstance(error, gymnasium.error.DependencyNotInstalled)
        if lacks and "mujoco" in str(error).lower():
            raise MissingExtraError(_MISSING.format("mujoco")) from error
        raise RLError(f"environment {full!r} cannot be made: {_reason(error)}") from error
    if own := _wrappers(gymnasium, wrapped):
        way_out = "environments run here without wrappers; put what they do into the environment"
        raise RLError(f"environment {full!r} is wrapped in {', '.join(own)}; {way_out}")
    env, box = wrapped.unwrapped, gymnasium.spaces.Box
    for what, space in (("actions", env.action_space), ("observations", env.observation_space)):
        if not isinstance(space, box) or (what == "actions" and len(space.shape) != 1):
            rule = "a vector" if what == "actions" else "arrays"
            rule = f"PPO here is for continuous control, whose {what} are {rule} of real numbers"
            raise RLError(f"environment {full!r} has {what} {space}; {rule}")
    low, high = (np.asarray(b, np.float64) for b in (env.action_space.low, env.action_space.high))
    size = int(np.prod(env.observation_space.shape))
    limit = int(wrapped.spec.max_episode_steps or 0)
    return env, Spaces(full, size, len(low), low, high, limit)


def _wrappers(gymnasium: Any, wrapped: Any) -> list[str]:
    """Wrappers other than those that gymnasium adds to every environment."""
    wrappers, found = gymnasium.wrappers, []
    usual = (wrappers.PassiveEnvChecker, wrappers.OrderEnforcing, wrappers.TimeLimit)
    while isinstance(wrapped, gymnasium.Wrapper):
        if not isinstance(wrapped, usual):
            found.append(type(wrapped).__name__)
        wrapped = wrapped.env
    return found


def _reason(error: Exception) -> str:
    """The message of an error, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@cache
def _check_saving(name: str) -> None:
    """Raise :class:`RLError` unless an environment continues unchanged after it is restored."""
    one, other = Simulation(name), Simulation(name)
    low, high = np.maximum(one.spaces.low, -1), np.minimum(one.spaces.high, 1)
    actions = np.random.default_rng(0).uniform(low, high, (SAVED_AFTER + COMPARED, len(low)))
    try:
        one.reset(0)
        for action in actions[:SAVED_AFTER]:
            if one.step(action)[-1]:
                one.reset(1)
        other.reset(2)
        other.restore(*one.state())
        for action in actions[SAVED_AFTER:]:
            steps = one.step(action), other.step(action)
            for seen, expected in zip(*steps, strict=True):
                np.testing.assert_array_equal(seen, expected)
            if steps[0][-1]:
                np.testing.assert_array_equal(one.reset(3), other.reset(3))
    except RLError:
        raise
    except Exception as error:  # an environment may raise anything
        reason = _reason(error)
        if isinstance(error, AssertionError):
            reason = (
                "its episodes go on differently after it is restored, so it keeps more elsewhere"
            )
        raise RLError(f"the state of environment {name!r} cannot be saved: {reason}") from error


def _quieten() -> None:
    """Log MuJoCo's warnings instead of writing a file into the current folder."""
    try:
        import mujoco
    except ImportError:  # MuJoCo is optional
        return
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_note)


def _note(text: str) -> None:
    _log.log(logging.DEBUG if "deprecated" in text else logging.WARNING, "MuJoCo: %s", text)


class Simulation:
    """One environment with its time limit, in a state that can be saved.

    Each episode has its own seed, so it is a function of that seed and of the actions.
    """

    def __init__(self, name: str) -> None:
        self.env, self.spaces = _make(name)
        self.elapsed = 0

    def reset(self, seed: int) -> NDArray[np.float64]:
        """Start an episode; returns its first observation."""
        self.elapsed = 0
        observation, _ = self.env.reset(seed=seed)
        return np.asarray(observation, np.float64).ravel()

    def step(self, action: NDArray[Any]) -> tuple[NDArray[np.float64], float, bool, bool]:
        """Act; returns observation, reward, whether the episode terminated and whether it ended."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.elapsed += 1
        ended = terminated or truncated or self.elapsed == self.spaces.limit
        seen = np.asarray(observation, np.float64).ravel()
        return seen, float(reward), bool(terminated), bool(ended)

    # ---------------------------------------------------------------------- checkpoints
    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """The complete state of the episode: arrays, and values for JSON."""
        meta = {"elapsed": self.elapsed, "random": self.env.np_random.bit_generator.state}
        if hasattr(self.env, "data") and hasattr(self.env, "model"):
            return self._simulator_state(), meta
        if getattr(self.env, "state", None) is None:
            wrong = "cannot be saved: it has no 'state' and no MuJoCo simulator"
            raise RLError(f"the state of environment {self.spaces.name!r} {wrong}")
        meta["kind"] = "tuple" if isinstance(self.env.state, tuple) else "array"
        return {"state": np.array(self.env.state, np.float64)}, meta

    def restore(self, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.env.reset(seed=0)
        self.elapsed = int(meta["elapsed"])
        self.env.np_random.bit_generator.state = meta["random"]
        if "integration" in arrays:
            self._restore_simulator(arrays)
        else:
            state = np.array(arrays["state"])
            self.env.state = tuple(map(float, state)) if meta["kind"] == "tuple" else state

    def _simulator_state(self) -> dict[str, NDArray[Any]]:
        import mujoco

        model, data = self.env.model, self.env.data
        kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        state = np.zeros(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, state, kind)
        derived = [getattr(data, name).ravel() for name in _derived(data)]
        return {"integration": state, "derived": np.concatenate(derived)}

    def _restore_simulator(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        import mujoco

        model, data = self.env.model, self.env.data
        kind = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_setState(model, data, np.array(arrays["integration"]), kind)
        at = 0
        for name in _derived(data):  # values of the last step's beginning, which no call recomputes
            array = getattr(data, name)
            array[...] = arrays["derived"][at : at + array.size].reshape(array.shape)
            at += array.size
        if at != arrays["derived"].size:
            raise ValueError(f"{arrays['derived'].size} derived numbers are not {at}")


def _derived(data: Any) -> list[str]:
    found = {name: getattr(data, name) for name in sorted(dir(data)) if _DERIVED.match(name)}
    return [n for n, a in found.items() if isinstance(a, np.ndarray) and a.dtype == np.float64]
