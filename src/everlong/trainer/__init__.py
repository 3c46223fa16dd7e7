"""Batches in, new weights out: losses, corrections, replay of recorded decisions, sums that do not depend on the cut.

Order, so that nothing is counted twice: renormalise over the kept set -> proximal logprobs -> rejection mask or importance
weight (detached) -> update-ratio surrogate -> un-normalised sums -> the one global denominator, when the batch closes.
Importing this package or its config loads no torch.
"""
