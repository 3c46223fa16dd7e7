"""The report of a run: curves as PNG, and one page with what was trained, curves, evaluations, ledger and episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from everlong.cli.config import RunConfig
from everlong.cli.rendering import make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.cli.untrained import num_rl_batches, untrained_lines
from everlong.contracts.records import Episode, Purpose, Turn
from everlong.ledger import EpisodeStore, EpisodeView, check_ledger, read_lifecycle
from everlong.models.config import (
    FolderModel,
    HubModel,
    ModelConfig,
    OwnModel,
    ScriptedModel,
    Smollm2Model,
    ToyModel,
    ToyMoeModel,
)
from everlong.observe import (
    EpisodeText,
    Gain,
    LossRow,
    TurnText,
    paired_gain,
    plot_panels,
    read_evaluations,
    read_panels,
    read_points,
    write_report,
)
from everlong.rollouts.harnesses.bash import shorten
from everlong.rollouts.renderers.tokenizers import Tokenizer
from everlong.storage import open_store

NUM_EPISODES = 4
MAX_TURNS, MAX_CHARS, MAX_KINDS = 40, 4000, 24
"""Shown of an episode, of a piece of it, of a set of tasks: an episode may have a million tokens, and a page is one file."""


def _model(config: ModelConfig) -> str:
    match config:
        case ToyModel():
            return "llama of 1.5M parameters over bytes, from random weights"
        case ToyMoeModel():
            return f"llama with experts ({config.router} router) of 2M parameters over bytes, from random weights"
        case ScriptedModel():
            return "scripted answers, no weights"
        case Smollm2Model():
            return f"SmolLM2-135M-Instruct in {config.dtype}"
        case FolderModel():
            return f"the checkpoint {config.path} in {config.dtype}"
        case OwnModel():
            return f"{config.source} in {config.dtype}"
        case HubModel():
            return f"{config.repo} at {config.revision} in {config.dtype}"


def write_run_report(folder: RunFolder) -> Path:
    """Raises FileNotFoundError where there is no run."""
    config = folder.open()
    store = EpisodeStore(open_store(folder.store_url(config)))
    tokenizer = make_renderer(config).tokenizer
    lifecycle = read_lifecycle(folder.ledger)
    views = list(lifecycle.episodes.values())
    episodes = [episode_text(store.get(view.payload_key, view.payload_hash), tokenizer) for view in _telling(views)]
    if panels := read_panels(read_points(folder.metrics)):
        plot_panels(panels, folder.path / "curves.png")
    ledger = check_ledger(folder.ledger)
    return write_report(
        folder.path,
        summary=summarize(config, views),
        warning=untrained_lines(config, num_rl_batches(lifecycle), views, folder.path),
        balance=ledger.balance.tables(),
        losses=[LossRow(length=d.name, episodes=d.episodes, lost=d.lost) for d in ledger.deciles],
        episodes=episodes,
        gain=gain_of_rl(views),
    )


def gain_of_rl(views: Sequence[EpisodeView]) -> Gain | None:
    """Success on the same held-out tasks from the first evaluation to the last; None where there are not two."""
    held_out = [view for view in views if view.purpose is Purpose.EVAL]
    rounds: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    num_tasks = len({view.task for view in held_out})
    for view in held_out:
        if view.reward is not None:
            rounds[view.group // num_tasks][view.task].append(float(view.reward >= 1.0))
    return paired_gain(rounds[min(rounds)], rounds[max(rounds)]) if len(rounds) > 1 else None


def success_lines(folder: RunFolder) -> list[str]:
    """Held-out success before and after the RL batches, with intervals, for the terminal. Empty without evaluation."""
    evaluations = read_evaluations(read_points(folder.metrics))
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    shown = [("before RL", first)] if first is last else [("before RL", first), ("after RL", last)]
    title = "held-out success, in brackets the 95 % interval:"
    lines = [title, *(f"  {when:9}  {one.text} of {one.episodes} episodes" for when, one in shown)]
    gain = gain_of_rl(list(read_lifecycle(folder.ledger).episodes.values()))
    return lines if gain is None else [*lines, f"  gain       {gain.text}, paired over {gain.num_tasks} tasks"]


def summarize(config: RunConfig, views: Sequence[EpisodeView]) -> dict[str, str]:
    """What was trained and how, a sentence per part."""
    schedule, warmup, optimizer = config.schedule, config.warmup, config.optimizer
    warm_rate = optimizer.supervised_learning_rate or optimizer.learning_rate
    per_batch = f"{schedule.groups_per_batch} tasks with {schedule.group_size} attempts each"
    summary = {
        "model": _model(config.model),
        "tasks": f"trained: {_kinds(views, Purpose.TRAIN)}. Held out: {_kinds(views, Purpose.EVAL)}.",
        "agent": f"{_agent(config)}, at most {config.harness.max_turns} turns; {_grading(config)}",
    }
    if warmup.num_batches:
        shown = f", of {warmup.num_tasks} of the training tasks" if warmup.num_tasks else ""
        summary["warm-up"] = (
            f"{warmup.num_batches} batches of {warmup.traces_per_batch} oracle traces, imitated{shown}; "
            f"learning rate {warm_rate:g}"
        )
    summary["RL"] = (
        f"{schedule.num_batches} batches of {per_batch}; {config.loss.type.upper()} on credit against the group's mean; "
        f"learning rate {optimizer.learning_rate:g}"
    )
    return summary


def _agent(config: RunConfig) -> str:
    if config.harness.type == "bash":
        return "answers with a bash command per turn until it says it is done"
    return f"the harness {config.harness.type}"


def _grading(config: RunConfig) -> str:
    if config.grading.type == "verifier":
        return "the task's verifier in the sandbox gives the reward"
    return f"{config.grading.type} gives the reward"


def _kinds(views: Sequence[EpisodeView], purpose: Purpose) -> str:
    """Example: "90 tasks (make-folder 30, write-word 60)"."""
    tasks = {view.task for view in views if view.purpose is purpose}
    if not tasks:
        return "none yet"
    kinds = sorted(Counter(kind_of(task) for task in tasks).items())
    named = [f"{kind} {count}" for kind, count in kinds[:MAX_KINDS]]
    if len(kinds) > MAX_KINDS:
        named.append(f"{len(kinds) - MAX_KINDS} more kinds")
    return f"{len(tasks)} tasks ({', '.join(named)})"


def kind_of(task: str) -> str:
    """Of "terminal/write-word/17": what stands before the number."""
    return task.rsplit("/", 2)[-2] if task.count("/") >= 2 else task.partition("/")[0]


def _telling(views: list[EpisodeView]) -> list[EpisodeView]:
    """A success and a failure from the beginning, and from the end, where there are such."""
    graded = [v for v in views if v.payload_key and v.reward is not None and v.purpose is Purpose.TRAIN]
    wanted = []
    for ordered in (graded, graded[::-1]):
        for good in (False, True):
            wanted += [view for view in ordered if ((view.reward or 0.0) >= 1.0) is good][:1]
    return list({view.episode: view for view in wanted}.values())[:NUM_EPISODES]


def episode_text(episode: Episode, tokenizer: Tokenizer) -> EpisodeText:
    turns: list[TurnText] = []
    for turn in _ends(episode.turns):
        pieces = context_turns(turn.context.ids.tolist(), tokenizer)
        said = tokenizer.decode(turn.sampled.ids.tolist())
        pieces.append(TurnText(role=f"assistant, turn {turn.index}", text=said or "(said nothing)"))
        shown = [msgspec.structs.replace(piece, text=shorten(piece.text, MAX_CHARS)) for piece in pieces]
        turns += [msgspec.structs.replace(shown[0], fork=_fork(turn, len(episode.turns))), *shown[1:]]
    versions = [int(turn.sampled.versions[0]) for turn in episode.turns if len(turn.sampled)]
    policy = f", policy version {versions[0]}" if versions else ""
    verdict = "no verdict" if episode.reward is None else f"reward {episode.reward:g}"
    return EpisodeText(
        title=f"{kind_of(episode.order.task)}{policy}, {episode.id}, ended: {episode.reason}",
        outcome=verdict,
        succeeded=None if episode.reward is None else episode.reward >= 1,
        turns=tuple(turns),
    )


def _ends(turns: Sequence[Turn]) -> list[Turn]:
    """All, or the first and the last of too many for one page."""
    if len(turns) <= MAX_TURNS:
        return list(turns)
    return [*turns[: MAX_TURNS // 2], *turns[-MAX_TURNS // 2 :]]


def _fork(turn: Turn, num_turns: int) -> str:
    if num_turns > MAX_TURNS and turn.index == num_turns - MAX_TURNS // 2:
        return f"{num_turns - MAX_TURNS} turns are left out: `everlong view` shows them"
    if turn.parent == turn.index - 1:
        return ""
    return "begins anew" if turn.parent < 0 else f"goes on from turn {turn.parent}"


def context_turns(ids: Sequence[int], tokenizer: Tokenizer) -> list[TurnText]:
    """The messages that a ChatML context adds; the header of the answer that follows is none."""
    start, end = tokenizer.special("<|im_start|>"), tokenizer.special("<|im_end|>")
    found, body, inside = [], [], False
    for token in ids:
        if token == end and inside:
            role, _, text = tokenizer.decode(body).partition("\n")
            found.append(TurnText(role=role, text=text or "(printed nothing)"))
            inside = False
        elif token == start:
            body, inside = [], True
        else:
            body.append(token)
    return found
