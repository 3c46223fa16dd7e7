"""The quickstart under three schedules, rounds, partial and asynchronous, and in rounds with vLLM, from one warm-up, with the same seeds.

    python -m tests.study.schedules --vllm

Per seed the quickstart's warm-up runs once; then its RL batches run in each arm from there, the arms in turn, and nothing else
differs than `schedule.type` or `engine.type`. Runs that are done are kept in the work folder: the same command goes on where it
stopped. The figures go to docs/evidence, the curves to docs/pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from tests.evidence import ROOT, keep_to_one_code, write_evidence
from tests.study.running import run_or_go_on

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt

from everlong.cli.config import RunConfig
from everlong.cli.quickstart import quickstart_config, tasks_for
from everlong.cli.run_folder import RunFolder
from everlong.engines.config import VllmConfig
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.ledger import check_ledger
from everlong.models.config import FolderModel, Smollm2Model, ToyModel
from everlong.observe import Point, read_points, read_rows
from everlong.orchestrator.config import AsyncConfig, PartialConfig, RoundsConfig, WarmupConfig

PATHS = ("src/everlong", "tests/study/schedules.py", "tests/study/running.py")
COLORS = {"rounds": "tab:blue", "partial": "tab:orange", "async": "tab:green", "rounds, vllm": "tab:purple"}


class Study:
    def __init__(self, work: Path, model: str, *, vllm: bool) -> None:
        self._work, self._vllm = work, vllm
        self._base = quickstart_config(model)
        assert isinstance(self._base.model, ToyModel | Smollm2Model)
        self._dtype = self._base.model.dtype
        made = tasks_for(self._base.model)
        for name, split, count in (("train", Split.TRAIN, made.num_train), ("eval", Split.EVAL, made.num_eval)):
            if not (work / name).exists():
                make_terminal(work / name, count, split=split, kinds=made.kinds)
        self._tasks = TasksConfig(train=(work / "train",), eval=(work / "eval",))

    def seed(self, seed: int) -> dict[str, RunFolder]:
        warm = run_or_go_on("sft", self._folder(seed, "warm-up"), self._config(seed))
        return {
            name: run_or_go_on("train", self._folder(seed, name), self._config(seed, warm, arm))
            for name, arm in self._arms().items()
        }

    def _arms(self) -> dict[str, dict[str, object]]:
        """What of the run's config makes each arm."""
        rounds = self._base.schedule
        same = {name: getattr(rounds, name) for name in ("num_batches", "groups_per_batch", "group_size", "eval_every")}
        same |= {"max_running": rounds.max_running, "checkpoint_every": rounds.checkpoint_every}
        arms: dict[str, dict[str, object]] = {
            "rounds": {"schedule": RoundsConfig(**same)},
            "partial": {"schedule": PartialConfig(**same)},
            "async": {"schedule": AsyncConfig(**same)},
        }
        if self._vllm:
            arms["rounds, vllm"] = {**arms["rounds"], "engine": VllmConfig()}
        return arms

    def _config(
        self,
        seed: int,
        start: RunFolder | None = None,
        arm: Mapping[str, object] | None = None,
    ) -> RunConfig:
        changed: dict[str, object] = {"seed": seed, "tasks": self._tasks}
        if start is not None:
            changed["model"] = FolderModel(path=start.checkpoint, dtype=self._dtype)
            changed["warmup"] = WarmupConfig()
            changed["optimizer"] = self._base.optimizer.model_copy(update={"supervised_learning_rate": None})
            changed |= arm or {}
        return self._base.model_copy(update=changed)

    def _folder(self, seed: int, name: str) -> RunFolder:
        return RunFolder(self._work / f"seed-{seed}" / name.replace(", ", "-"))


def figures_of(run: RunFolder) -> dict[str, object]:
    """Seconds are of the RL batches with the evaluations between them; shares of time are means over batches."""
    points = read_points(run.metrics)
    batches = [values for _, values in sorted(read_rows(points, "batch").items())]
    seconds = sum(values.get("seconds/between_batches") or 0.0 for values in batches)
    trained = sum(samples(values) for values in batches)
    ages = sorted({name for values in batches for name in values if name.startswith("staleness/share/")})
    return {
        "seconds": seconds,
        "trained_samples_per_hour": 3600 * trained / seconds,
        "idle": mean_of(batches, "idle"),
        "idle_engine": mean_of(batches, "idle/engine"),
        "idle_trainer": mean_of(batches, "idle/trainer"),
        "age_shares": {name.rsplit("/", 1)[1]: share_of_tokens(batches, name) for name in ages},
        "staleness_max": max((values.get("staleness/max") or 0.0) for values in batches),
        "mismatch_mean": mean_of(batches, "mismatch/mean"),
        "success": {str(step): success for step, success in successes(points).items()},
        "rewards": [values.get("reward") for values in batches],
        "ledger_balances": check_ledger(run.ledger).ok,
    }


def samples(values: Mapping[str, float | None]) -> float:
    """Episodes that trained in a batch."""
    per_hour, seconds = values.get("samples_per_hour"), values.get("seconds/between_batches")
    return (per_hour or 0.0) * (seconds or 0.0) / 3600


def mean_of(batches: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    found = [value for values in batches if (value := values.get(name)) is not None]
    return statistics.fmean(found) if found else None


def share_of_tokens(batches: Sequence[Mapping[str, float | None]], name: str) -> float:
    """Of all that the batches trained; a batch that lacks the share has none of it."""
    weighed = [(values.get("tokens/trained") or 0.0, values.get(name) or 0.0) for values in batches]
    return sum(tokens * share for tokens, share in weighed) / sum(tokens for tokens, _ in weighed)


def successes(points: Sequence[Point]) -> dict[int, float]:
    """By the number of RL batches before the evaluation."""
    return {
        point.step: success
        for point in points
        if point.axis == "eval" and (success := point.values.get("success")) is not None
    }


def draw(found: Mapping[int, Mapping[str, RunFolder]], path: Path) -> None:
    """Held-out success over the seconds of RL, and trained tokens by age."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for seed, runs in found.items():
        for name, run in runs.items():
            points = read_points(run.metrics)
            batches = [values for _, values in sorted(read_rows(points, "batch").items())]
            ends = [0.0]
            for values in batches:
                ends.append(ends[-1] + (values.get("seconds/between_batches") or 0.0) / 60)
            success = successes(points)
            label = name if seed == min(found) else None
            left.plot(
                [ends[step] for step in success],
                [100 * value for value in success.values()],
                "o-",
                color=COLORS[name],
                label=label,
                alpha=0.8,
            )
    left.set(xlabel="minutes of RL", ylabel="held-out success, %", title="One warm-up, one set of seeds", ylim=(0, 100))
    left.legend(frameon=False)
    runs = found[min(found)]
    ages: dict[str, dict[str, float]] = {name: figures_of(run)["age_shares"] for name, run in runs.items()}  # ty: ignore[invalid-assignment]
    names = sorted({age for shares in ages.values() for age in shares})
    for place, (name, shares) in enumerate(ages.items()):
        xs = [index + 0.8 * (place + 0.5) / len(ages) - 0.4 for index in range(len(names))]
        right.bar(xs, [100 * shares.get(age, 0.0) for age in names], 0.75 / len(ages), color=COLORS[name], label=name)
    right.set(xlabel="age in policy versions", ylabel="trained tokens, %", title="How old what was trained was")
    right.set_xticks(range(len(names)), names)
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.study.schedules", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--model", default="smollm2", choices=("smollm2", "toy"))
    parser.add_argument("--vllm", action="store_true", help="also rounds with engine.type vllm (`make vllm`)")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "study-schedules", help="goes on with what is there"
    )
    parser.add_argument("--evidence", type=Path, default=ROOT / "docs" / "evidence" / "schedules.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "schedules.png")
    args = parser.parse_args()
    keep_to_one_code(args.work.absolute(), PATHS)
    study = Study(args.work.absolute(), args.model, vllm=args.vllm)
    found: dict[int, dict[str, RunFolder]] = {}
    for seed in range(args.seeds):
        found[seed] = study.seed(seed)
        rows = {str(seed): {name: figures_of(run) for name, run in runs.items()} for seed, runs in found.items()}
        print(json.dumps(rows[str(seed)], indent=2), flush=True)
        command = f"python -m tests.study.schedules --seeds {seed + 1} --model {args.model}{' --vllm' * args.vllm}"
        write_evidence(args.evidence, name="schedules", command=command, seed=0, figures=rows, paths=PATHS)
        draw(found, args.picture)


if __name__ == "__main__":
    main()
