"""Measure B14: the cost of recording every trajectory, relative to the rollout."""

import tempfile
from pathlib import Path

from agent_vllm.record import RolloutRecorder
from agent_vllm.types import Trajectory
from benchmarks.figures import Figure, at_most, in_turns, medians, ratios
from benchmarks.rollouts import reset_prefix_cache, rollout_all
from benchmarks.work import setup


def recording(quick: bool) -> list[Figure]:
    """Measure B14: write the record and the learner's logprobs; tools take no time."""
    num_tasks = 4 if quick else 64
    ours = setup()
    latest: list[Trajectory] = []

    def write_all() -> None:
        for trajectory in latest:
            record_id = recorder.write(trajectory)
            assert record_id is not None
            recorder.amend(record_id, learner_logprobs=trajectory.logprobs)

    def roll_out() -> None:
        reset_prefix_cache(engine)
        latest[:] = rollout_all(engine, ours, num_tasks, "none")

    with ours.vllm() as engine, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        with RolloutRecorder(path, tokenizer=ours.tokenizer) as recorder:
            roll_out()
            seconds = in_turns({"rollout": roll_out, "record": write_all}, 1 if quick else 5)
    return [
        Figure(
            id="B14", what=f"{num_tasks} trajectories: recording / rollout",
            goal=at_most(0.03), values=ratios(seconds["record"], seconds["rollout"]),
            note=medians(seconds),
        )
    ]  # fmt: skip
