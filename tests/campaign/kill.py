"""Kills runs with SIGKILL at random moments, resumes them, and compares what comes of it with a run that nobody disturbed.

    python -m tests.campaign.kill --kills 10 --seed 0

An undisturbed reference first. Then, for each target (the control process, the worker, both at once), runs that are killed
once and resumed until they end. Every third kill comes at a moment drawn over the reference's duration; the others shortly
after a fact drawn over the reference's ledger, so that they meet every kind of work also while the machine is busy with
something else and a process needs half of the time to start. For each run:

- the ledger balances (`everlong ledger check`), and every episode that was started has ended;
- no episode that had finished was started again;
- every batch holds the same groups as the reference's, so the data cursor skipped and repeated nothing;
- every stored episode holds the same tokens, logprobs, versions and reward as the reference's;
- the final weights equal the reference's, bit for bit, in the store and in the exported checkpoint;
- no process and no sandbox folder of the run is left.

Runs that are done are noted in the work folder: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
from tests.campaign.comparing import Outcome, differences, facts_of, num_facts, outcome_of, sampled_twice
from tests.campaign.processes import Process, child_worker, left_over
from tests.campaign.small_run import make_tasks, small_config, start, start_train
from tests.evidence import ROOT, keep_to_one_code, write_evidence

from everlong.cli.config import WeightsConfig
from everlong.contracts.records import Record

Target = Literal["control", "worker", "both"]
TARGETS: tuple[Target, ...] = get_args(Target)
PATHS = ("src/everlong", "tests/campaign")
BY_CLOCK_EVERY = 3
AFTER_FACT_S = 0.4
"""A kill by progress comes up to so long after its fact: training and saving write none."""
MAX_RESUMES = 3
MAX_DRAWS = 5
"""A run that ended before it could be killed is run again with another moment, so often at most."""
DEATH_S = 30.0
"""A process whose other half was killed has this long to end by itself."""
RUN_S = 600.0


class KilledRun(Record, frozen=True, kw_only=True):
    target: Target
    index: int
    moment_s: float
    """After the start of the control process, its death included."""
    num_facts: int
    """In the ledger when the process was killed."""
    last_fact: str
    """The kind of the last of them; "nothing" before the first."""
    num_resumes: int
    num_started_again: int
    """Episodes that a kill interrupted."""
    num_trained_again: int
    """Batches that the newest checkpoint lacked."""
    failures: tuple[str, ...]
    """What did not hold; nothing is a success."""
    elapsed_s: float


class Moment(Record, frozen=True, kw_only=True):
    """When to kill: after so many facts, and then so many seconds later."""

    num_facts: int
    delay_s: float


class Reference(Record, frozen=True, kw_only=True):
    duration_s: float
    outcome: Outcome


@dataclass(frozen=True)
class Campaign:
    """Kills of one small run. What it made and found lies in `work`."""

    work: Path
    model: Literal["toy", "scripted"]
    num_warmup: int
    seed: int
    stores: str | None = None
    """URL below which each run that is killed has a store of its own; None is its folder. The reference has its folder."""

    def run(self, num_kills: int) -> Iterator[KilledRun]:
        """Every target's runs in turn; those of an earlier process are read back."""
        reference = self.reference()
        done = {(run.target, run.index): run for run in self._noted()}
        for index in range(num_kills):
            for target in TARGETS:
                run = done.get((target, index))
                if run is None:
                    run = self.kill(target, index, reference)
                    with self._notes.open("ab") as notes:
                        notes.write(msgspec.json.encode(run) + b"\n")
                yield run

    def reference(self) -> Reference:
        """The undisturbed run. Raises RuntimeError where it did not end well."""
        known = self.work / "reference.json"
        if known.exists():
            return msgspec.json.decode(known.read_bytes(), type=Reference)
        began = time.monotonic()
        folder, control = replace(self, stores=None).start("reference")
        if control.wait(RUN_S) != 0:
            raise RuntimeError(f"the undisturbed run failed: see {folder.with_suffix('.log')}")
        reference = Reference(duration_s=time.monotonic() - began, outcome=outcome_of(folder))
        known.write_bytes(msgspec.json.encode(reference))
        return reference

    def kill(self, target: Target, index: int, reference: Reference) -> KilledRun:
        """Start a run, kill it, resume it to its end, check it."""
        began = time.monotonic()
        folder, moment_s, failures = self._start_and_kill(target, index, reference)
        before = facts_of(folder)
        num_resumes, ended = self.resume_to_end(folder)
        failures += ended or self.check(folder, reference.outcome)
        kinds = Counter(type(fact).__name__ for fact in facts_of(folder))
        return KilledRun(
            target=target,
            index=index,
            moment_s=round(moment_s, 3),
            num_facts=len(before),
            last_fact=type(before[-1]).__name__ if before else "nothing",
            num_resumes=num_resumes,
            num_started_again=kinds["EpisodeInterrupted"],
            num_trained_again=kinds["BatchTrained"] - len(reference.outcome.batches),
            failures=tuple(failures),
            elapsed_s=round(time.monotonic() - began, 1),
        )

    def _start_and_kill(self, target: Target, index: int, reference: Reference) -> tuple[Path, float, list[str]]:
        draws = np.random.default_rng([self.seed, TARGETS.index(target), index])
        duration_s = reference.duration_s
        for draw in range(MAX_DRAWS):
            if index % BY_CLOCK_EVERY == BY_CLOCK_EVERY - 1:
                moment = Moment(num_facts=0, delay_s=float(draws.uniform(0.0, duration_s)))
            else:
                fact = int(draws.integers(1, reference.outcome.num_facts))
                moment = Moment(num_facts=fact, delay_s=float(draws.uniform(0.0, AFTER_FACT_S)))
            began = time.monotonic()
            folder, control = self.start(f"{target}-{index}-{draw}")
            failures = _kill_at(control, target, folder, moment)
            elapsed_s = time.monotonic() - began
            if failures is not None:
                return folder, elapsed_s, failures + left_over(folder, folders=False, patience_s=DEATH_S)
            duration_s = min(duration_s, elapsed_s)  # the machine is less busy than it was
        raise RuntimeError(f"{MAX_DRAWS} runs ended before they could be killed: see {folder}")

    def start(self, name: str) -> tuple[Path, subprocess.Popen[bytes]]:
        """A run's folder, and the control process that has begun to fill it."""
        folder = _fresh(self.work / "runs" / name)
        tasks = make_tasks(self.work / "tasks", easy=self.model == "toy")
        config = small_config(tasks, folder, self.model, self.num_warmup)
        if self.stores is not None:
            config = config.model_copy(update={"weights": WeightsConfig(store=f"{self.stores}/{folder.name}")})
        return folder, start_train(config)

    def resume_to_end(self, folder: Path) -> tuple[int, list[str]]:
        """How many resumes it took, and what went wrong."""
        for number in range(1, MAX_RESUMES + 1):
            if _resume(folder).wait(RUN_S) == 0:
                return number, []
        return MAX_RESUMES, [f"not finished after {MAX_RESUMES} resumes: see {folder.with_suffix('.log')}"]

    def check(self, folder: Path, reference: Outcome) -> list[str]:
        """What does not hold of a run that has ended."""
        failures = []
        if start("ledger", "check", str(folder), log=folder.with_suffix(".log")).wait(RUN_S) != 0:
            failures.append("the ledger does not balance")
        failures += sampled_twice(facts_of(folder))
        failures += differences(reference, outcome_of(folder))
        return failures + left_over(folder, folders=True, patience_s=DEATH_S)

    @property
    def _notes(self) -> Path:
        return self.work / "kills.jsonl"

    def _noted(self) -> list[KilledRun]:
        lines = self._notes.read_bytes().splitlines() if self._notes.exists() else []
        return [msgspec.json.decode(line, type=KilledRun) for line in lines]


def _fresh(folder: Path) -> Path:
    """A name that no earlier process of the campaign left something under."""
    number = 0
    while (chosen := folder.with_name(f"{folder.name}-{number}")).with_suffix(".toml").exists():
        number += 1
    return chosen


def _kill_at(control: subprocess.Popen[bytes], target: Target, folder: Path, moment: Moment) -> list[str] | None:
    """What went wrong after the kill; None where the run had ended before it."""
    while control.poll() is None and moment.num_facts and num_facts(folder) < moment.num_facts:
        time.sleep(0.01)
    until = time.monotonic() + moment.delay_s
    while control.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    worker = child_worker(control.pid)
    while control.poll() is None and worker is None and target != "control":
        time.sleep(0.005)
        worker = child_worker(control.pid)
    if control.poll() is not None:
        return None
    if target != "worker":
        control.send_signal(signal.SIGKILL)
    if target != "control" and worker is not None:
        worker.kill()
    return _wait_for_deaths(control, worker, target)


def _wait_for_deaths(control: subprocess.Popen[bytes], worker: Process | None, target: Target) -> list[str]:
    """The half that was not killed must notice and end."""
    failures = []
    try:
        control.wait(DEATH_S)
    except subprocess.TimeoutExpired:
        control.kill()
        control.wait()
        failures.append(f"the control process outlived the {target} by {DEATH_S:.0f} s")
    if worker is not None and not worker.wait(DEATH_S):
        worker.kill()
        failures.append(f"the worker outlived the {target} by {DEATH_S:.0f} s")
    return failures


def _resume(folder: Path) -> subprocess.Popen[bytes]:
    """A run that was killed before it had written its config has nothing to resume: it is started again."""
    log = folder.with_suffix(".log")
    if (folder / "config.toml").exists():
        return start("resume", str(folder), log=log)
    return start("train", "@", str(folder.with_suffix(".toml")), log=log)


def figures_of(reference: Reference, runs: list[KilledRun]) -> dict[str, object]:
    outcome = reference.outcome
    return {
        "kills": len(runs),
        "kills_by_target": dict(Counter(run.target for run in runs)),
        "runs_with_failures": sum(bool(run.failures) for run in runs),
        "runs_with_the_weights_of_the_reference": sum(not any("weights" in f for f in run.failures) for run in runs),
        "episodes_per_run": len(outcome.episodes),
        "batches_per_run": len(outcome.batches),
        "tokens_trained_per_run": outcome.tokens_trained,
        "reference_weights": outcome.weights,
        "reference_duration_s": round(reference.duration_s, 1),
        "facts_per_run": outcome.num_facts,
        "facts_at_the_kill": sorted(run.num_facts for run in runs),
        "killed_after": dict(sorted(Counter(run.last_fact for run in runs).items())),
        "episodes_started_again": sum(run.num_started_again for run in runs),
        "batches_trained_again": sum(run.num_trained_again for run in runs),
        "most_resumes_of_a_run": max(run.num_resumes for run in runs),
        "failures": [f"{run.target} {run.index}: {failure}" for run in runs for failure in run.failures],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.kill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="per target")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--model", choices=("toy", "scripted"), default="toy")
    parser.add_argument("--warmup", type=int, default=24, help="supervised batches before the first RL batch")
    parser.add_argument("--work", type=Path, help="folder that this campaign has to itself; goes on with what is there")
    parser.add_argument("--evidence", type=Path, default=ROOT / "docs" / "evidence" / "kill.json")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills must be at least 1, got {args.kills}")
    work = (args.work or ROOT / "runs" / f"kill-{args.model}-{args.seed}").absolute()
    keep_to_one_code(work, PATHS)
    campaign = Campaign(work, args.model, args.warmup, args.seed)
    runs = []
    for run in campaign.run(args.kills):
        runs.append(run)
        verdict = "; ".join(run.failures) or "same weights, same batches, nothing left"
        print(
            f"{run.target:8}{run.index:3}  killed at {run.moment_s:6.2f} s after {run.num_facts:4} facts "
            f"({run.last_fact}), {run.num_started_again:2} episodes and {run.num_trained_again} batches again: {verdict}",
            flush=True,
        )
    figures = figures_of(campaign.reference(), runs)
    write_evidence(
        args.evidence,
        name="kill",
        command=f"python -m tests.campaign.kill --kills {args.kills} --seed {args.seed}",
        seed=args.seed,
        figures=figures,
        paths=PATHS,
    )
    sys.exit(1 if figures["runs_with_failures"] else 0)


if __name__ == "__main__":
    main()
