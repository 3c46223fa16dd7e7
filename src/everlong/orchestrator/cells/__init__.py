"""A cell: one process that hosts an engine and a trainer, reached by messages over a local socket.

`supervisor` starts the process, `worker` is its main, `remote` holds the ports' other end. No torch here: the worker
imports what its factory path names.
"""
