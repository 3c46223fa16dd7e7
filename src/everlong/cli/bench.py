"""`everlong bench`: measure a part against a reference in the same run.

Every benchmark gives rows of one form: case, metric, unit, value, reference, reference_value, ratio; a ratio above 1 is
better than the reference. Repeats of the two sides are interleaved, so that a noisy machine hits both alike.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    metric: str
    unit: str
    value: float
    reference: str
    reference_value: float
    ratio: float
    """Above 1 means better than the reference."""


def _benches() -> dict[str, tuple[str, Callable[..., list[Row]]]]:
    from everlong.cli.benches import (
        aligned,
        delta,
        engine,
        ledger,
        lora,
        losses,
        routes,
        sandbox,
        step,
        trainer,
        weights,
    )

    return {
        "aligned": ("aligned numerics against fast ones: a training step and decoding on the toy", aligned.measure),
        "delta": (
            "a delta's size against plain codings and its entropy, its speed, and an engine's pause",
            delta.measure,
        ),
        "engine": ("the embedded engine against Hugging Face generate, SmolLM2-135M", engine.measure),
        "ledger": ("group commit against one commit per fact", ledger.measure),
        "lora": ("one RL step and one version through adapters against every weight, SmolLM2-135M", lora.measure),
        "losses": ("value and gradient of the losses that TRL has too, against TRL's", losses.measure),
        "routes": (
            "replayed routes against the trainer's own, and what they cost, on the toy with experts",
            routes.measure,
        ),
        "sandbox": (
            "sandboxes: start, command, pause, snapshot, fork and rollback per backend, and over-commit",
            sandbox.measure,
        ),
        "step": ("one RL step against TRL's GRPO trainer, SmolLM2-135M", step.measure),
        "trainer": ("the chunked head, trees against their branches, a tree larger than one pass", trainer.measure),
        "weights": ("delta size and time against shipping the whole weights", weights.measure),
    }


TAKES = {"store": "weights", "run": "delta", "case": "delta"}
"""Which bench an option is for."""


def bench_command(
    name: str, out: Path | None, store: str | None = None, run: Path | None = None, cases: Sequence[str] = ()
) -> None:
    """Raises ValueError for a bench that does not exist, and for an option that it would not use."""
    options = {"store": store, "run": run, "case": ",".join(cases) or None}
    for option, value in options.items():
        if value is not None and name != TAKES[option]:
            raise ValueError(
                f"bench {name or 'without a name'} uses no {option}, got --{option} {value}: leave it out, or measure "
                f"{TAKES[option]}"
            )
    console = Console(highlight=False)
    benches = _benches()
    if not name:
        table = Table("bench", "measures")
        for known, (text, _) in benches.items():
            table.add_row(known, text)
        console.print(table)
        return
    if name not in benches:
        raise ValueError(f"there is no bench {name!r}: there are {', '.join(benches)}")
    measure = benches[name][1]
    if name == TAKES["store"]:
        measure = partial(measure, store)
    elif name == TAKES["run"]:
        measure = partial(measure, run, cases)
    with only_one(Path(tempfile.gettempdir()) / "everlong-bench.lock"):
        rows = measure()
    console.print(_table(rows))
    if out is not None:
        out.write_text(json.dumps(figures(name, rows), indent=2) + "\n")


def figures(name: str, rows: Sequence[Row]) -> dict[str, object]:
    """What `--json` writes."""
    return {"bench": name, "rows": [asdict(row) for row in rows]}


@contextmanager
def only_one(path: Path) -> Generator[None]:
    """Two benchmarks at once on one machine would measure each other. Raises BlockingIOError where one runs."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"another bench runs on this machine and holds {path}: wait for its end") from error
        yield


def _table(rows: Sequence[Row]) -> Table:
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    caption = (
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, OMP_NUM_THREADS {threads}; a ratio above 1 is better"
    )
    table = Table("case", "metric", "unit", "value", "reference", "its value", "ratio", caption=caption)
    for row in rows:
        cells = (f"{row.value:.4g}", row.reference, f"{row.reference_value:.4g}", f"{row.ratio:.2f}")
        table.add_row(row.case, row.metric, row.unit, *cells)
    return table
