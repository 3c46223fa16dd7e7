"""A trainer over several processes on one machine: each computes some micro-batches, and owns some tensors of the optimiser.

`ranks.py` is what the trainer sees, `group.py` the exchange between processes, `leader.py` starts and watches them, `follower.py`
is the main of every one but the first. All ranks do the same in the same order; only the leader reads and writes for the run.
"""
