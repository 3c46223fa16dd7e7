"""What keeps learning on stale data, and what does not: losses, replay, projection, optimisers and critic on the toy.

    python -m tests.study.stability

The task and its staleness of 4 to 8 versions stand in stale_arm.py. Each arm has 300 batches and a thread, and takes minutes; those
that are done are kept in the work folder by a hash of their settings, and one that was stopped goes on. Curves go to docs/pictures,
figures to docs/evidence, the table into docs/stability.md. What an arm shows is reported as seen, whatever a paper says of it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from tests.evidence import ROOT, keep_to_one_code, write_evidence
from tests.study.stale_arm import Arm, Done, run_arm, warm
from tests.study.staleness_0 import Ratios, ratios_at_staleness_0

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt

from everlong.trainer.config import (
    AdamWConfig,
    CispoConfig,
    CriticConfig,
    GrpoConfig,
    GspoConfig,
    KimiConfig,
    MuonConfig,
    PpoConfig,
    TrainerConfig,
)
from everlong.trajectories.credit import GaeConfig, GroupMeanConfig

PATHS = ("src/everlong", "tests/study/stability.py", "tests/study/stale_arm.py", "tests/study/staleness_0.py")
MARK = "## What was seen\n"
LAST = 20
"""Batches over which an end is averaged."""
RATE = 3e-4
IMITATION = {"traces": 8, "answer_tokens": 12, "batches": 1500}
LONG = {"answer_tokens": 40, "groups": 2}
PRETRAIN = 30


def warm_batches(batches: int) -> int:
    """Of demonstrations before an arm: fewer than 60 teach the toy nothing that a reward could tell apart."""
    return max(60, batches // 2)


def arms(batches: int) -> dict[str, list[Arm]]:
    """By the comparison that they are for; one arm may be in several."""

    def three(name: str, **settings: object) -> list[Arm]:
        shared = {"name": name, "batches": batches, "warm_batches": warm_batches(batches), **settings}
        return [Arm.model_validate({**shared, "seed": seed}) for seed in range(3)]

    def one(name: str, **settings: object) -> list[Arm]:
        return three(name, **settings)[:1]

    def imitated(name: str, projection: str) -> list[Arm]:
        optimizer = AdamWConfig(learning_rate=2e-3, max_grad_norm=None)
        trainer = TrainerConfig.model_validate({"logit_projection": projection})
        scaled = {**IMITATION, "batches": IMITATION["batches"] * batches // 300}
        return one(name, optimizer=optimizer, trainer=trainer, **scaled)

    sapo = three("sapo")
    critic = CriticConfig(updates_per_batch=1, pretrain_batches=PRETRAIN * batches // 300)
    of_groups = GroupMeanConfig(scale="none")
    return {
        "losses": [
            *sapo,
            *three("grpo", loss=GrpoConfig()),
            *one("gspo", loss=GspoConfig()),
            *one("cispo", loss=CispoConfig()),
            *one("kimi", loss=KimiConfig(), credit=of_groups),
        ],
        "replay": [*sapo, *three("replay", top_p=0.95), *three("no-replay", top_p=0.95, replay=False)],
        "optimisers": [*sapo[:1], *one("muon", optimizer=MuonConfig(learning_rate=RATE))],
        "critic": [
            *one("long-group-mean", credit=of_groups, loss=GrpoConfig(clip_high=0.2, dual_clip=None), **LONG),
            *one("long-critic", credit=GaeConfig(), loss=PpoConfig(), critic=critic, **LONG),
        ],
        "projection": [
            *imitated("imitation", "none"),
            *imitated("imitation-mean", "mean"),
            *imitated("imitation-exact", "exact_target"),
        ],
    }


# Figures -------------------------------------------------------------------------------------------------------------


def values_of(done: Done, name: str) -> list[float]:
    return [row[name] for row in done.rows if name in row and math.isfinite(row[name])]


def ends(done: Done, name: str) -> tuple[float | None, float | None]:
    """Means over the first and the last batches."""
    values = values_of(done, name)
    return (statistics.fmean(values[:LAST]), statistics.fmean(values[-LAST:])) if values else (None, None)


def figures_of(arm: Arm, done: Done) -> dict[str, object]:
    names = ("reward", "entropy", "loss", "grad_norm", "mismatch/mean", "mismatch/kl", "ratio/mean", "ratio/gated",
             "staleness/mean", "kept/singleton_share", "credit/variance", "critic/explained_variance")  # fmt: skip
    found: dict[str, object] = {}
    for name in names:
        first, last = ends(done, name)
        if last is not None:
            found[name] = {"first": first, "last": last, "highest": max(values_of(done, name))}
    if arm.traces:
        found["spikes"] = spikes(values_of(done, "loss"))
    if isinstance(arm.credit, GaeConfig):
        explained = values_of(done, "critic/explained_variance")[: arm.critic.pretrain_batches]
        found["explained_after_pretraining"] = statistics.fmean(explained[-5:]) if explained else None
    return {"settings": arm.model_dump(mode="json"), "seconds": done.seconds, "batches": len(done.rows), **found}


def spikes(losses: Sequence[float]) -> int:
    """How often the loss went above 0.1 after it had been below 0.01."""
    found, learnt = 0, False
    for loss in losses:
        if learnt and loss > 0.1:
            found, learnt = found + 1, False
        learnt = learnt or loss < 0.01
    return found


# The page ------------------------------------------------------------------------------------------------------------

Cells = Mapping[str, Callable[[Arm, Done], float | None]]


def last(name: str) -> Callable[[Arm, Done], float | None]:
    return lambda arm, done: ends(done, name)[1]


def first(name: str) -> Callable[[Arm, Done], float | None]:
    return lambda arm, done: ends(done, name)[0]


OF_POLICIES: Cells = {
    "reward, first": first("reward"),
    "reward, last": last("reward"),
    "entropy, last": last("entropy"),
    "distance from the sampler in nats, last": last("mismatch/mean"),
    "gated, last": last("ratio/gated"),
    "gradient norm, last": last("grad_norm"),
}
COLUMNS: Mapping[str, Cells] = {
    "losses": OF_POLICIES,
    "replay": OF_POLICIES,
    "optimisers": OF_POLICIES,
    "critic": {
        **OF_POLICIES,
        "credit variance, last": last("credit/variance"),
        "explained variance, last": last("critic/explained_variance"),
    },
    "projection": {
        "loss, last": last("loss"),
        "highest loss of the last third": lambda arm, done: max(values_of(done, "loss")[-len(done.rows) // 3 :]),
        "spikes": lambda arm, done: float(spikes(values_of(done, "loss"))),
    },
}


def page(found: Mapping[str, Mapping[Arm, Done]], ratios: Ratios) -> str:
    lines = [
        MARK,
        f"At staleness 0, over {ratios.num_tokens} tokens sampled at top-p 0.95: without replay the log ratio is that of the kept mass, "
        f"to within {ratios.without_replay:.1e}, {ratios.mean_log_mass:.4f} in the mean; with replay it is 0, to within "
        f"{ratios.with_replay:.1e}.",
        "",
        "![curves](pictures/stability.png)",
    ]
    for comparison, done in found.items():
        cells = COLUMNS[comparison]
        lines += ["", f"### {comparison.capitalize()}", "", "| arm | seeds | " + " | ".join(cells) + " |"]
        lines.append("|---" * (len(cells) + 2) + "|")
        for name in dict.fromkeys(arm.name for arm in done):
            own = {arm: result for arm, result in done.items() if arm.name == name}
            row = [spread([value(arm, result) for arm, result in own.items()]) for value in cells.values()]
            lines.append(f"| {name} | {len(own)} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float | None]) -> str:
    """The mean over seeds, and their range where there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    text = f"{statistics.fmean(known):.3g}"
    return text if len(known) == 1 else f"{text} ({min(known):.3g} to {max(known):.3g})"


def draw(found: Mapping[str, Mapping[Arm, Done]], path: Path) -> None:
    """One panel for each comparison: the reward, or the loss of imitation, smoothed over the batches of one version."""
    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.8), layout="constrained", squeeze=False)
    for panel, (comparison, done) in zip(axes[0], found.items(), strict=True):
        metric = "loss" if comparison == "projection" else "reward"
        for place, name in enumerate(dict.fromkeys(arm.name for arm in done)):
            for arm, result in done.items():
                values = np.array(values_of(result, metric))
                if arm.name != name or not len(values):
                    continue
                smooth = np.convolve(values, np.ones(5) / 5, "valid") if metric == "reward" else values
                panel.plot(smooth, color=f"C{place}", alpha=0.8, lw=1, label=name if arm.seed == 0 else None)
        panel.set(title=comparison, xlabel="batch", ylabel=metric)
        if metric == "loss":
            panel.set_yscale("log")
        panel.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.study.stability", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, default=300, help="of an arm")
    parser.add_argument("--only", nargs="*", help="names of arms; all by default")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "study-stability", help="goes on with what is there"
    )
    parser.add_argument("--evidence", type=Path, default=ROOT / "docs" / "evidence" / "stability.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "stability.png")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "stability.md")
    args = parser.parse_args()
    work = args.work.absolute()
    keep_to_one_code(work, PATHS)
    torch.set_num_threads(1)
    ratios = ratios_at_staleness_0(asyncio.run(warm(work, 0, warm_batches(args.batches))))
    print(ratios, flush=True)
    chosen = {
        comparison: [arm for arm in members if not args.only or arm.name in args.only]
        for comparison, members in arms(args.batches).items()
    }
    found: dict[str, dict[Arm, Done]] = {}
    for comparison, members in chosen.items():
        for arm in members:
            done = run_arm(work, arm)
            found.setdefault(comparison, {})[arm] = done
            ended = {name: round(value, 4) for name in ("reward", "entropy", "loss") if (value := ends(done, name)[1])}
            print(f"{arm.key}: {done.seconds:.0f} s, {ended}", flush=True)
    figures = {
        "staleness_0": {name: getattr(ratios, name) for name in ratios.__slots__},
        "arms": {arm.key: figures_of(arm, done) for members in found.values() for arm, done in members.items()},
    }
    command = f"python -m tests.study.stability --batches {args.batches}"
    command += f" --only {' '.join(args.only)}" if args.only else ""
    write_evidence(args.evidence, name="stability", command=command, seed=0, figures=figures, paths=PATHS)
    draw(found, args.picture)
    before = args.page.read_text(encoding="utf-8").partition(MARK)[0] if args.page.exists() else ""
    args.page.write_text(before + page(found, ratios), encoding="utf-8")


if __name__ == "__main__":
    main()
