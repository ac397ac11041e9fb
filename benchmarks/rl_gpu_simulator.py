"""MuJoCo's simulator for GPUs beside the one in C: steps a second, and whether they agree.

    pip install mujoco-warp
    python benchmarks/rl_gpu_simulator.py [--device cuda] [--environments HalfCheetah-v5 Ant-v5]

The question is which of them gives more agents of Figure 8 a minute. An agent has one environment,
whose three million steps come one after the other, so the GPU needs many agents at once: `worlds`
are stepped together, one CUDA graph per environment step. The C simulator's rate is that of one
core, without anything else of an agent; :mod:`rl_speed` has whole agents.

Agreement: both make one environment step from the same states, those of a rollout by the C
simulator with random actions. They compute with 32 and 64 bits, and a contact that one of them has
and the other not makes a large difference, so that medians and the 99th of 100 are shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import mujoco
import numpy as np
from batched_cpu import processor_name
from numpy.typing import NDArray

Array = NDArray[np.float64]
DOCS = Path(__file__).parents[1] / "docs"
WORLDS = (1, 40, 400, 4096)
AGENT = 3_000_000
"""Steps of an agent of Figure 8."""
CONTACTS = 64
"""Room for contacts and constraint rows of a world, four rows each; ample for these bodies."""

PAGE = """# MuJoCo's simulators for agents: {device} and one core of {core}

`python benchmarks/rl_gpu_simulator.py --device {kind}`, mujoco {mujoco}, mujoco-warp {warp}.
Environment steps (several of the simulator) without agents. *Cores*: those whose C simulators make
as many steps a second. *Hours*: for three million steps, one after the other. *Agents an hour*:
worlds over these hours, as if acting and learning cost nothing. The paper has 40 agents.

| environment | simulator | worlds | a step | steps/s | cores | hours | agents an hour |
|---|---|---:|---:|---:|---:|---:|---:|
{speeds}

One step from the same states, largest difference of a position and of a velocity:

| environment | states | position, median | 99% | velocity, median | 99% |
|---|---:|---:|---:|---:|---:|
{agreement}
"""


class Rollout(NamedTuple):
    """States, the actions taken in them, and the states after one environment step."""

    before: Array  # [N, nq + nv]
    actions: Array
    after: Array


def rollout(environment: Any, count: int) -> Rollout:
    """`count` states of random actions by the C simulator; a new episode whenever one ends."""
    model, data = environment.model, environment.data
    rng = np.random.default_rng(0)
    before, actions, after = [], [], []
    environment.reset(seed=0)
    while len(before) < count:
        action = rng.uniform(-1, 1, model.nu) * environment.action_space.high
        data.qacc_warmstart[:] = 0  # neither simulator remembers the step before
        before.append(np.concatenate([data.qpos, data.qvel]))
        actions.append(action)
        _, _, ended, _, _ = environment.step(action)
        after.append(np.concatenate([data.qpos, data.qvel]))
        if ended or len(before) % 1000 == 0:
            environment.reset()
    return Rollout(np.array(before), np.array(actions), np.array(after))


def c_step(environment: Any, repeats: int = 2000) -> float:
    """Seconds of an environment step by the C simulator on one core, with random actions."""
    model, data = environment.model, environment.data
    rng = np.random.default_rng(0)
    environment.reset(seed=0)
    actions = rng.uniform(-1, 1, (repeats, model.nu)) * environment.action_space.high
    start = time.process_time()
    for action in actions:
        data.ctrl[:] = action
        mujoco.mj_step(model, data, environment.frame_skip)
    return (time.process_time() - start) / repeats


class Worlds:
    """Worlds of an environment on a device, stepped together."""

    def __init__(self, environment: Any, count: int, device: str) -> None:
        import mujoco_warp
        import warp

        self.warp, self.step_once = warp, mujoco_warp.step
        self.count, self.skip = count, environment.frame_skip
        with warp.ScopedDevice(device):
            mujoco.mj_forward(environment.model, environment.data)
            self.model = mujoco_warp.put_model(environment.model)
            self.data = mujoco_warp.put_data(
                environment.model,
                environment.data,
                nworld=count,
                nconmax=CONTACTS,
                njmax=4 * CONTACTS,
            )
            self._steps()  # compiles
            self.graph = None
            if warp.get_device(device).is_cuda:
                with warp.ScopedCapture() as capture:
                    self._steps()
                self.graph = capture.graph
        self.device = device

    def _steps(self) -> None:
        for _ in range(self.skip):
            self.step_once(self.model, self.data)

    def step(self) -> None:
        """One environment step."""
        with self.warp.ScopedDevice(self.device):
            if self.graph is None:
                self._steps()
            else:
                self.warp.capture_launch(self.graph)

    def seconds(self, repeats: int) -> float:
        """Of an environment step, after some that are not counted."""
        for timed in (False, True):
            self.warp.synchronize()
            start = time.perf_counter()
            for _ in range(repeats if timed else 3):
                self.step()
            self.warp.synchronize()
        return (time.perf_counter() - start) / repeats

    def after(self, states: Array, actions: Array) -> Array:
        """The states after one step from these, one per world."""
        positions = self.data.qpos.shape[1]
        self.data.qpos.assign(states[:, :positions].astype(np.float32))
        self.data.qvel.assign(states[:, positions:].astype(np.float32))
        self.data.ctrl.assign(actions.astype(np.float32))
        self.data.qacc_warmstart.zero_()
        self.step()
        return np.concatenate([self.data.qpos.numpy(), self.data.qvel.numpy()], 1, dtype=float)


def speed_rows(name: str, steps: Sequence[tuple[str, int, float]]) -> list[str]:
    """Rows of the table of speeds: simulator, worlds and seconds of a step; one core's is first."""
    core, rows = steps[0][2], []
    for simulator, worlds, seconds in steps:
        hours = AGENT * seconds / 3600
        cells = (
            name, simulator, str(worlds), f"{1e6 * seconds:.0f} µs", f"{worlds / seconds:.0f}",
            f"{worlds * core / seconds:.1f}", f"{hours:.2f}", f"{worlds / hours:.0f}",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def agreement_row(name: str, positions: int, truth: Array, found: Array) -> str:
    """Largest differences over a state's positions and velocities: medians and 99th of 100."""
    apart = np.abs(found - truth)
    parts = (apart[:, :positions].max(1), apart[:, positions:].max(1))
    cells = [f"{np.quantile(part, q):.1e}" for part in parts for q in (0.5, 0.99)]
    return f"| {name} | {len(truth)} | {' | '.join(cells)} |"


def measured(name: str, device: str, worlds: Sequence[int], say: Callable[[str], None]) -> tuple:
    """An environment's rows of both tables."""
    environment = gym.make(name).unwrapped
    steps = [("C, one core", 1, c_step(environment))]
    known = rollout(environment, 400)
    for count in worlds:
        made = Worlds(environment, count, device)
        steps.append((f"Warp, {device}", count, made.seconds(300 if device == "cuda" else 3)))
        say(f"{name}: {count} worlds, {1e6 * steps[-1][2]:.0f} µs a step")
    found = Worlds(environment, len(known.before), device).after(known.before, known.actions)
    row = agreement_row(name, environment.model.nq, known.after, found)
    return speed_rows(name, steps), row


def main() -> None:
    """The page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    names = ["HalfCheetah-v5", "Hopper-v5", "Ant-v5"]
    parser.add_argument("--environments", nargs="+", default=names)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--output", type=Path, default=DOCS / "benchmarks/rl_gpu_simulator.md")
    args = parser.parse_args()
    from importlib.metadata import version

    import warp

    speeds, agreement = [], []
    for name in args.environments:
        rows, row = measured(name, args.device, args.worlds, print)
        speeds += rows
        agreement.append(row)
        text = PAGE.format(
            device=warp.get_device(args.device).name,
            core=processor_name(),
            kind=args.device,
            mujoco=mujoco.__version__,
            warp=version("mujoco-warp"),
            speeds="\n".join(speeds),
            agreement="\n".join(agreement),
        )
        args.output.write_text(text)  # what is measured so far
    print(text)


if __name__ == "__main__":
    main()
