"""vLLM's process groups, apart from the learner's.

vLLM takes the process's default group for its own world and makes its groups out of it, which every
rank of a learner would have to do at the same moment. Invariant: an engine in this process is alone
in its groups, whatever the learner's world is, and the learner's default group stays the default.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup, destroy_process_group, distributed_c10d

_users: set[object] = set()  # engines that live
_default: ProcessGroup | None = None  # theirs, of this process alone


@contextmanager
def own_default_group() -> Iterator[None]:
    """Inside, the default group is vLLM's; none until vLLM has made it."""
    global _default
    learners = distributed_c10d.GroupMember.WORLD
    distributed_c10d._update_default_pg(_default)
    try:
        yield
    finally:
        _default = distributed_c10d.GroupMember.WORLD
        distributed_c10d._update_default_pg(learners)


def acquire(engine: object) -> None:
    """An engine is about to be built; it shares the groups with those that live."""
    _users.add(engine)


def release(engine: object) -> None:
    """The engine is gone; the last one takes the groups with it."""
    global _default
    _users.discard(engine)
    if _users or _default is None:
        return
    from vllm.distributed import parallel_state

    with own_default_group():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
    destroy_process_group(_default)  # by name: as the default it would take the learner's along
    _default = None
