# mypy: ignore-errors
"""Rollouts in one compiled call: MuJoCo's C functions between an agent's own arithmetic.

Python costs more than the arithmetic of small environments: an environment's step makes a dozen
arrays and a dictionary. Here :func:`roll` acts, steps and normalises without Python until an
episode ends. Observations, rewards and ends are those of gymnasium's classes, in their order of
operations; :mod:`upgd.rl.simulators` has the addresses and numbers that it takes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from upgd.kernels import compiling
from upgd.kernels.vectors import call, fused
from upgd.rl.kernels import act, receive

_compiled = compiling.njit(nogil=True, error_model="numpy")
_helper = njit(nogil=True, error_model="numpy")

# Integers: C functions and structures by address, the substeps of a step, and whose rules hold.
STEP, FORCES, MODEL, DATA, SUBSTEPS, KIND = range(6)
INTEGERS = 6
KINDS = ("planar", "ant", "humanoid", "standup")
PLANAR, ANT, HUMANOID = range(3)
# Numbers: weights of the reward, the seconds that differences are divided by, and healthy ranges.
FORWARD, CONTROL, HEALTHY, CONTACT, SECONDS, TERMINATES = range(6)
LOW_Z, HIGH_Z, LOW_ANGLE, HIGH_ANGLE, LOW_STATE, HIGH_STATE = range(6, 12)
LOW_SPEED, HIGH_SPEED, LOW_FORCE, HIGH_FORCE = range(12, 16)  # observations are clipped to these
LOW_COST, HIGH_COST = range(16, 18)  # the cost of contacts is clipped to these
MASS, FUSED = range(18, 20)  # of all bodies, and whether gymnasium's sum over them rounds once
NUMBERS = 20
SUMMED = 128
"""The most numbers that numpy sums without taking them apart."""
# Why a call of `roll` has ended.
FULL, ENDED, BROKEN = range(3)


class Arrays(NamedTuple):
    """Views of a simulation's arrays, each as a vector; body 0, which comes first, is the world."""

    control: np.ndarray
    position: np.ndarray
    velocity: np.ndarray
    places: np.ndarray  # 3 numbers of each body
    centres: np.ndarray  # of its mass, 3 numbers of each body
    masses: np.ndarray
    inertias: np.ndarray  # 10 numbers of each body
    speeds: np.ndarray  # 6 numbers of each body
    actuators: np.ndarray  # the force on each degree of freedom
    forces: np.ndarray  # 6 numbers of each body
    clipped: np.ndarray  # room for Ant's clipped forces


@_helper
def _square_sum(values):
    """Σ v², in the order of numpy's sum of up to :data:`SUMMED` numbers."""
    count = len(values)
    if count < 8:
        total = 0.0
        for i in range(count):
            total += values[i] * values[i]
        return total
    parts = np.zeros(8)
    whole = count - count % 8
    for start in range(0, whole, 8):
        for k in range(8):
            parts[k] += values[start + k] * values[start + k]
    total = (parts[0] + parts[1]) + (parts[2] + parts[3])
    total += (parts[4] + parts[5]) + (parts[6] + parts[7])
    for i in range(whole, count):
        total += values[i] * values[i]
    return total


@_helper
def _simulate(integers, control, action):
    for i in range(len(action)):
        control[i] = action[i]
    for _ in range(integers[SUBSTEPS]):
        call(integers[STEP], integers[MODEL], integers[DATA])


@_helper
def _put(raw, at, values, first):
    """Copy values from `first` on into an observation; returns where it goes on."""
    for i in range(first, len(values)):
        raw[at] = values[i]
        at += 1
    return at


@_helper
def _planar(integers, numbers, arrays, action, raw):
    """A step of HalfCheetah, Hopper or Walker2d; returns the reward and whether it is healthy."""
    position, velocity = arrays.position, arrays.velocity
    before = position[0]
    _simulate(integers, arrays.control, action)
    at = _put(raw, 0, position, 1)
    for i in range(len(velocity)):
        raw[at + i] = min(max(velocity[i], numbers[LOW_SPEED]), numbers[HIGH_SPEED])
    healthy = numbers[LOW_Z] < position[1] < numbers[HIGH_Z]
    healthy = healthy and numbers[LOW_ANGLE] < position[2] < numbers[HIGH_ANGLE]
    for i in range(2, len(position)):
        healthy = healthy and numbers[LOW_STATE] < position[i] < numbers[HIGH_STATE]
    for i in range(len(velocity)):
        healthy = healthy and numbers[LOW_STATE] < velocity[i] < numbers[HIGH_STATE]
    reward = numbers[FORWARD] * ((position[0] - before) / numbers[SECONDS])
    reward += numbers[HEALTHY] if healthy else 0.0
    return reward - numbers[CONTROL] * _square_sum(action), healthy


@_helper
def _ant(integers, numbers, arrays, action, raw):
    """A step of Ant."""
    position, velocity, clipped = arrays.position, arrays.velocity, arrays.clipped
    before = arrays.places[3]
    _simulate(integers, arrays.control, action)
    call(integers[FORCES], integers[MODEL], integers[DATA])
    for i in range(len(clipped)):
        clipped[i] = min(max(arrays.forces[i], numbers[LOW_FORCE]), numbers[HIGH_FORCE])
    at = _put(raw, 0, position, 2)
    at = _put(raw, at, velocity, 0)
    _put(raw, at, clipped, 6)
    healthy = numbers[LOW_Z] <= position[2] <= numbers[HIGH_Z]
    for i in range(len(position)):
        healthy = healthy and math.isfinite(position[i])
    for i in range(len(velocity)):
        healthy = healthy and math.isfinite(velocity[i])
    reward = numbers[FORWARD] * ((arrays.places[3] - before) / numbers[SECONDS])
    reward += numbers[HEALTHY] if healthy else 0.0
    costs = numbers[CONTROL] * _square_sum(action) + numbers[CONTACT] * _square_sum(clipped)
    return reward - costs, healthy


@_helper
def _centre(numbers, masses, centres):
    """The first coordinate of the centre of mass."""
    total = 0.0
    for body in range(len(masses)):
        if numbers[FUSED]:
            total = fused(masses[body], centres[3 * body], total)
        else:
            total += masses[body] * centres[3 * body]
    return total / numbers[MASS]


@_helper
def _move(integers, numbers, arrays, action, raw):
    """A humanoid's step but for the reward; returns the costs of control and of contacts."""
    _simulate(integers, arrays.control, action)
    call(integers[FORCES], integers[MODEL], integers[DATA])
    at = _put(raw, 0, arrays.position, 2)
    at = _put(raw, at, arrays.velocity, 0)
    at = _put(raw, at, arrays.inertias, 10)
    at = _put(raw, at, arrays.speeds, 6)
    at = _put(raw, at, arrays.actuators, 6)
    _put(raw, at, arrays.forces, 6)
    control = numbers[CONTROL] * _square_sum(arrays.control)  # 0 where MuJoCo has reset itself
    contact = numbers[CONTACT] * _square_sum(arrays.forces)
    return control, min(max(contact, numbers[LOW_COST]), numbers[HIGH_COST])


@_helper
def _humanoid(integers, numbers, arrays, action, raw):
    """A step of Humanoid."""
    before = _centre(numbers, arrays.masses, arrays.centres)
    control, contact = _move(integers, numbers, arrays, action, raw)
    speed = (_centre(numbers, arrays.masses, arrays.centres) - before) / numbers[SECONDS]
    healthy = numbers[LOW_Z] < arrays.position[2] < numbers[HIGH_Z]
    reward = numbers[FORWARD] * speed + (numbers[HEALTHY] if healthy else 0.0)
    return reward - (control + contact), healthy


@_helper
def _standup(integers, numbers, arrays, action, raw):
    """A step of HumanoidStandup, whose reward is for its height."""
    control, contact = _move(integers, numbers, arrays, action, raw)
    return arrays.position[2] / numbers[SECONDS] - control - contact + 1.0, True


@_compiled
def advance(integers, numbers, arrays, action, raw):
    """A step of an environment; `raw` receives the observation.

    Returns the reward and whether the episode terminated.
    """
    if integers[KIND] == PLANAR:
        reward, healthy = _planar(integers, numbers, arrays, action, raw)
    elif integers[KIND] == ANT:
        reward, healthy = _ant(integers, numbers, arrays, action, raw)
    elif integers[KIND] == HUMANOID:
        reward, healthy = _humanoid(integers, numbers, arrays, action, raw)
    else:
        reward, healthy = _standup(integers, numbers, arrays, action, raw)
    return reward, not healthy and numbers[TERMINATES] > 0


# fmt: off
@_compiled
def roll(
    t, step, layers, work, deviations, low, high, seed, clipped, raw, normalisers,
    observations, actions, log_probabilities, rewards, values, ends,
    gamma, clip_seen, clip_reward, integers, numbers, arrays, limit, elapsed, total,
):
    """Act from row `t` on, until the arrays are full, an episode ends or a number is not finite.

    `step` is the agent's at row 0, `elapsed` and `total` are the episode's steps and rewards so
    far. Returns the next row, why it has ended, `elapsed`, `total` and the last reward.
    """
    # fmt: on
    reward = 0.0
    while t < len(rewards):
        log_probabilities[t], values[t] = act(
            *(layers, work, deviations, observations[t]),
            *(low, high, seed, step + t, actions[t], clipped),
        )
        reward, terminated = advance(integers, numbers, arrays, clipped, raw)
        elapsed += 1
        total += reward
        sound = receive(
            *(normalisers, raw, reward, terminated, gamma),
            *(clip_seen, clip_reward, observations[t + 1], rewards, t),
        )
        t += 1
        if not sound:
            return t, BROKEN, elapsed, total, reward
        ended = terminated or elapsed == limit
        ends[t] = ended
        if ended:
            return t, ENDED, elapsed, total, reward
    return t, FULL, elapsed, total, reward
