"""A folder store whose writer is killed in the middle of writing."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from everlong.storage import open_store

WRITER = """
import sys
from everlong.storage import open_store
store = open_store(sys.argv[1])
number = 0
while True:
    for act, name in ((store.put, "put"), (store.create, "created")):
        act(f"{name}/{sys.argv[2]}-{number}", bytes([number % 256]) * 4_000_000)
    store.put("replaced", bytes([number % 256]) * 4_000_000)
    print(number, flush=True)
    number += 1
"""


def test_objects_are_whole_or_absent_after_kill_9(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    acknowledged: list[str] = []
    for round_ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(round_)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        acknowledged.append(f"{round_}-{int(writer.stdout.readline())}")
        time.sleep(rng.uniform(0, 0.05))
        writer.kill()
        acknowledged += [f"{round_}-{int(line)}" for line in writer.stdout.read().splitlines()]
        writer.wait()
        store = open_store(str(tmp_path))
        for key in store.list(""):
            data = store.get(key)
            assert len(data) == 4_000_000 and len(set(data)) == 1, key
    assert {f"{kind}/{name}" for kind in ("put", "created") for name in acknowledged} <= set(store.list(""))
