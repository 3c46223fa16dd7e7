"""Which task a group asks: a pure function of the seed and the group's number, so that a resume can skip nothing.

No cursor is saved. Groups are numbered from 0; each pass over the tasks is one seeded permutation of all of them.
"""

import numpy as np


def task_of_group(group: int, num_tasks: int, seed: int) -> int:
    """Index of the task that group `group` asks. Every task comes once per epoch of `num_tasks` groups."""
    epoch, place = divmod(group, num_tasks)
    return int(np.random.default_rng([seed, epoch]).permutation(num_tasks)[place])


def shown_tasks(num_shown: int, num_tasks: int, seed: int) -> list[int]:
    """Indices of the tasks whose oracle traces a warm-up shows: the first of their seeded epoch, in the tasks' order."""
    return sorted(task_of_group(place, num_tasks, seed + 1) for place in range(num_shown))


def traces_of_batch(batch: int, traces_per_batch: int, num_traces: int, seed: int) -> list[int]:
    """Indices of the oracle traces of warm-up batch `batch`, in seeded epochs like the groups."""
    first = batch * traces_per_batch
    return [task_of_group(first + i, num_traces, seed + 1) for i in range(traces_per_batch)]
