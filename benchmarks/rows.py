"""List the rows by id, in running order. Each imports what it needs when it is measured."""

import importlib
from dataclasses import dataclass

from benchmarks.figures import Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Name one row, which may have several figures. `measure` is "module:function"."""

    id: str
    measure: str

    def run(self, quick: bool) -> list[Figure]:
        module, _, function = self.measure.partition(":")
        return getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick)


ROWS = {
    id_: Row(id=id_, measure=measure)
    for id_, measure in {
        "B1": "rollouts:against_bound",
        "B2": "trl_loop:rollout_wall",
        "B3": "rollouts:against_barrier",
        "B4": "engines:against_bare_generate",
        "B5": "engines:against_torch",
        "B6": "rollouts:against_seed",
        "B7": "engines:weight_sync",
        "B8": "engines:start_up",
        "B9": "host:host_time",
        "B10": "host:memory",
        "B11": "learner:old_logprobs",
        "B12": "trl_loop:step_wall",
        "B13": "rollouts:prefix_cache",
        "B14": "recording:recording",
        "B15": "host:long_agents",
        "L1": "shared_prefix:recorded",
        "L2": "shared_prefix:long_prompt",
        "L3": "shared_prefix:bfcl",
        "L4": "shared_prefix:building",
        "L5": "shared_prefix:memory",
        "L6": "shared_prefix:whole_step",
        "S1": "simulation:rollouts",
        "S2": "simulation:steps",
    }.items()
}
