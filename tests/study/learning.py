"""Does RL teach what more imitation does not? SmolLM2-135M on ten kinds of terminal tasks, several seeds.

    python -m tests.study.learning --seeds 3

Every kind has one demonstration, and many tasks with a verifier. For each seed, which draws the demonstrated tasks, the order of
the others and every sampled token:

- `warm-up`: the demonstrations are imitated until nothing is gained any more. `two thirds` is the same run stopped after two
  thirds of its batches, so that the difference of both is what the last third gained.
- `rl`: from there, batches of groups with the verifiers' rewards.
- `imitation`: from there, more batches of the demonstrations, for at least the time that RL took.
- `shuffled`: as `rl`, with the rewards dealt at random within each group.

Every gain is taken on the same held-out variants, at the training temperature, paired by task. Kinds that were never trained
are evaluated before and after RL. Runs that are done are kept in the work folder: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.evidence import ROOT, keep_to_one_code, write_evidence
from tests.study.running import everlong, run_or_go_on

from everlong.cli.config import ObserveConfig, RunConfig, SamplingConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import Purpose
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.ledger import check_ledger, read_lifecycle
from everlong.models.config import FolderModel, Smollm2Model
from everlong.observe import Gain, paired_gain, read_points, read_rows
from everlong.orchestrator.config import RoundsConfig, WarmupConfig
from everlong.rollouts.config import HarnessConfig
from everlong.trainer.config import AdamWConfig
from everlong.trajectories.credit import GroupMeanConfig

KINDS = (
    "write-word",
    "append-line",
    "copy-into-folder",
    "delete-extension",
    "sum-numbers",
    "largest-number",
    "sort-unique",
    "replace-word",
    "count-matches",
    "json-key",
)
"""Those that one demonstration teaches in part: a kind that is always or never solved after it has nothing that a reward could teach."""
NUM_TRAIN, NUM_EVAL, NUM_OTHER_KINDS = 600, 200, 60
NUM_SHOWN = len(KINDS)
NUM_WARMUP, NUM_RL = 60, 20
PATHS = ("src/everlong", "tests/study/learning.py", "tests/study/running.py")

Success = Mapping[str, Sequence[float]]
"""By task, 1 for each attempt that succeeded and 0 for each other."""


class Study:
    def __init__(self, work: Path, num_rl: int) -> None:
        self._work, self._num_rl = work, num_rl
        for name, split, count, kinds in (
            ("train", Split.TRAIN, NUM_TRAIN, KINDS),
            ("eval", Split.EVAL, NUM_EVAL, KINDS),
            ("other-kinds", Split.HELD_OUT_KINDS, NUM_OTHER_KINDS, ()),
        ):
            if not (work / name).exists():
                make_terminal(work / name, count, split=split, kinds=kinds)

    def _tasks(self, demonstrated: Path | None = None) -> TasksConfig:
        return TasksConfig(train=(demonstrated or self._work / "train",), eval=(self._work / "eval",))

    def seed(self, seed: int) -> dict[str, object]:
        """The four arms of one seed, and what came of them."""
        warm = self._imitate(seed, "warm-up", NUM_WARMUP)
        two_thirds = self._imitate(seed, "two-thirds", NUM_WARMUP * 2 // 3)
        rl = self._reinforce(seed, "rl", warm, GroupMeanConfig())
        num_more = math.ceil(seconds_of(rl) / seconds_per_batch(warm))
        more = self._imitate(seed, "imitation", num_more, start=warm)
        shuffled = self._reinforce(seed, "shuffled", warm, GroupMeanConfig(shuffled=True))
        return {
            "seed": seed,
            "before": mean(success_of(rl, 0)),
            "after": mean(success_of(rl, self._num_rl)),
            "rl": gain(success_of(rl, 0), success_of(rl, self._num_rl)),
            "imitation": gain(success_of(rl, 0), success_of(more, 0)),
            "shuffled": gain(success_of(shuffled, 0), success_of(shuffled, self._num_rl)),
            "last_third_of_warm_up": gain(success_of(two_thirds, 0), success_of(warm, 0)),
            "other_kinds_before": self._other_kinds(rl, 0),
            "other_kinds_after": self._other_kinds(rl, self._num_rl),
            "seconds": {"rl": seconds_of(rl), "imitation": seconds_of(more), "shuffled": seconds_of(shuffled)},
            "imitation_batches": num_more,
            "ledgers_balance": all(check_ledger(run.ledger).ok for run in (warm, rl, more, shuffled)),
        }

    def pooled(self, seeds: Sequence[int]) -> dict[str, object]:
        """The gains over all seeds: a task of each seed is one pair."""
        found: dict[str, object] = {}
        for arm, name, last in (
            ("rl", "rl", self._num_rl),
            ("imitation", "imitation", 0),
            ("shuffled", "shuffled", self._num_rl),
        ):
            before: dict[str, Sequence[float]] = {}
            after: dict[str, Sequence[float]] = {}
            for seed in seeds:
                first = self._folder(seed, "rl" if arm == "imitation" else arm)
                before |= {f"{seed} {task}": values for task, values in success_of(first, 0).items()}
                after |= {
                    f"{seed} {task}": values for task, values in success_of(self._folder(seed, name), last).items()
                }
            found[arm] = gain(before, after)
        return found

    def _imitate(self, seed: int, name: str, num_batches: int, start: RunFolder | None = None) -> RunFolder:
        shown = self._work / f"seed-{seed}" / "demonstrated"
        if not shown.exists():
            make_terminal(shown, NUM_SHOWN, seed=seed + 1, split=Split.TRAIN, kinds=KINDS)
        warmup = WarmupConfig(num_batches=num_batches, traces_per_batch=NUM_SHOWN)
        config = self._config(seed, start).model_copy(update={"warmup": warmup, "tasks": self._tasks(shown)})
        return run_or_go_on("sft", self._folder(seed, name), config)

    def _reinforce(self, seed: int, name: str, start: RunFolder, credit: GroupMeanConfig) -> RunFolder:
        return run_or_go_on(
            "train", self._folder(seed, name), self._config(seed, start).model_copy(update={"credit": credit})
        )

    def _config(self, seed: int, start: RunFolder | None) -> RunConfig:
        model = (
            Smollm2Model(dtype="bfloat16") if start is None else FolderModel(path=start.checkpoint, dtype="bfloat16")
        )
        return RunConfig(
            seed=seed,
            model=model,
            tasks=self._tasks(),
            harness=HarnessConfig(system_prompt="", max_turns=5, max_context=512),
            sampling=SamplingConfig(max_tokens=48),
            schedule=RoundsConfig(
                num_batches=self._num_rl, groups_per_batch=8, group_size=8, max_running=64, checkpoint_every=100
            ),
            optimizer=AdamWConfig(learning_rate=1e-4 if start is None else 3e-5),
            observe=ObserveConfig(progress="plain"),
        )

    def _folder(self, seed: int, name: str) -> RunFolder:
        return RunFolder(self._work / f"seed-{seed}" / name)

    def _other_kinds(self, run: RunFolder, version: int) -> float:
        out = run.path.with_name(f"other-kinds-{version}.json")
        if not out.exists():
            words = ["eval", str(run.path), "--tasks", str(self._work / "other-kinds"), "--version", str(version)]
            everlong(*words, "--json", str(out))
        return json.loads(out.read_text())["reward"]


def success_of(run: RunFolder, index: int) -> dict[str, list[float]]:
    """Of the evaluation after `index` RL batches."""
    views = [view for view in read_lifecycle(run.ledger).episodes.values() if view.purpose is Purpose.EVAL]
    num_tasks = len({view.task for view in views})
    found: dict[str, list[float]] = {}
    for view in views:
        if view.group // num_tasks == index and view.reward is not None:
            found.setdefault(view.task, []).append(float(view.reward >= 1.0))
    return found


def mean(success: Success) -> float:
    return sum(sum(values) / len(values) for values in success.values()) / len(success)


def gain(before: Success, after: Success) -> dict[str, float]:
    """In points: 100 is from never to always."""
    found = paired_gain(before, after)
    assert found is not None, "both evaluations are of the same tasks"
    return {name: 100 * getattr(found, name) for name in Gain._fields[:3]} | {"pairs": found.num_tasks}


def seconds_of(run: RunFolder) -> float:
    """Of its batches, without start and evaluations."""
    points = [point.values for point in read_points(run.metrics) if point.axis == "batch"]
    names = ("seconds/sampling", "seconds/packing", "seconds/recording", "seconds/training")
    return sum(values.get(name) or 0.0 for values in points for name in names)


def seconds_per_batch(run: RunFolder) -> float:
    return seconds_of(run) / len(read_rows(read_points(run.metrics), "batch"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.study.learning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=NUM_RL, help="of RL, per seed")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "study-learning", help="goes on with what is there"
    )
    parser.add_argument("--evidence", type=Path, default=ROOT / "docs" / "evidence" / "learning.json")
    args = parser.parse_args()
    keep_to_one_code(args.work.absolute(), PATHS)
    study = Study(args.work.absolute(), args.batches)
    rows = []
    for seed in range(args.seeds):
        rows.append(study.seed(seed))
        print(json.dumps(rows[-1], indent=2), flush=True)
        figures = {"pooled": study.pooled(range(seed + 1)), "seeds": rows, "kinds": KINDS, "demonstrations": NUM_SHOWN}
        command = f"python -m tests.study.learning --seeds {seed + 1} --batches {args.batches}"
        write_evidence(args.evidence, name="learning", command=command, seed=0, figures=figures, paths=PATHS)


if __name__ == "__main__":
    main()
