"""`everlong ledger check`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from everlong.ledger import Decile, check_ledger
from everlong.observe import percent


def _losses(deciles: Sequence[Decile]) -> Table:
    table = Table("episodes of", "ended", "lost", "tokens too old", title="lost by length", title_justify="left")
    for decile in deciles:
        lost = f"{decile.lost} ({percent(decile.loss_rate, decile.episodes)} %)"
        old = f"{decile.over_age} ({percent(decile.over_age_rate, decile.tokens)} %)"
        table.add_row(decile.name, str(decile.episodes), lost, old)
    return table


def check_command(run: Path) -> None:
    """Prints the balance; exit code 1 where it does not hold."""
    report = check_ledger(run / "ledger.db" if run.is_dir() else run)
    console = Console(highlight=False)
    for title, rows in report.balance.tables().items():
        table = Table("state", "count", title=title, title_justify="left")
        for name, count in rows.items():
            table.add_row(name, str(count))
        console.print(table)
    if report.deciles:
        console.print(_losses(report.deciles))
    for problem in report.problems:
        console.print(f"[red]problem:[/red] {problem}")
    verdict = "balances" if report.ok else "does not balance"
    console.print(f"{report.num_facts} facts: the ledger {verdict}")
    if not report.ok:
        sys.exit(1)
