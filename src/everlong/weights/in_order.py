"""Work on many tensors at once, a few of them at a time, with results in the order in which they were asked for."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

SMALL = 1 << 21
"""Fewer values in all are not worth a second thread."""

MOST_THREADS = 8
"""More wait for memory."""


def threads_for(num_values: int) -> int:
    return 1 if num_values < SMALL else min(MOST_THREADS, os.cpu_count() or 1)


def in_order(work: Callable[[A], R], arguments: Iterable[A], num_threads: int) -> Iterator[R]:
    """The results of `work`, one after the other; at most two for each thread are under way or wait to be taken.

    `arguments` are taken in the caller's thread. The first error is raised where its result would come.
    """
    if num_threads == 1:
        yield from map(work, arguments)
        return
    with ThreadPoolExecutor(num_threads, thread_name_prefix="weights") as pool:
        under_way: deque[Future[R]] = deque()
        try:
            for argument in arguments:
                under_way.append(pool.submit(work, argument))
                if len(under_way) >= 2 * num_threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
