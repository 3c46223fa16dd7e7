"""The engine embedded in the worker: paged keys and values, a prefix cache, continuous batching, one step at a time.

`scheduler` and `blocks` decide (pure, no torch), `runner` computes a step in a thread of its own under the compute lease,
`engine` is the port. Importing the package loads no torch; `engine` does.
"""
