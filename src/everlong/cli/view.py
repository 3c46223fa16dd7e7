"""`everlong view`: the episodes of a run, or one of them as a tree of turns."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from everlong.cli.rendering import make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.cli.selecting import Wanted, select_episodes
from everlong.contracts.records import Episode, Turn
from everlong.ledger import EpisodeStore, EpisodeView, read_lifecycle
from everlong.rollouts.renderers.tokenizers import Tokenizer
from everlong.storage import open_store
from everlong.trajectories.tree import EpisodeTree

console = Console(highlight=False)
MAX_ROWS = 200


def view_command(run: Path, episode: str, wanted: Wanted, limit: int | None, every: bool) -> None:
    """`every`: without a limit. Raises ValueError for options that have no effect."""
    if limit is not None and (every or limit < 1):
        raise ValueError(
            "--limit and --all exclude each other" if every else f"--limit must be at least 1, got {limit}"
        )
    folder = RunFolder(run)
    config = folder.open()
    lifecycle = read_lifecycle(folder.ledger)
    episodes = lifecycle.episodes
    if not episode:
        views = select_episodes(lifecycle, wanted, config.warmup.num_batches)
        shown = views if every else views[-(limit or MAX_ROWS) :]
        if shown:
            console.print(_listing(shown))
        console.print(_count_text(len(shown), len(views), len(episodes)))
        return
    if wanted != Wanted() or every or limit is not None:
        raise ValueError(f"options that choose episodes have no effect on one of them: leave them or {episode} out")
    if episode not in episodes:
        raise ValueError(f"{run} has no episode {episode!r}: `everlong view {run}` lists them")
    view = episodes[episode]
    if not view.payload_key:
        raise ValueError(f"episode {episode} is {view.state}: it has no stored content yet")
    stored = EpisodeStore(open_store(folder.store_url(config))).get(view.payload_key, view.payload_hash)
    console.print(episode_tree(stored, view, make_renderer(config).tokenizer))


def _listing(views: list[EpisodeView]) -> Table:
    # an id that was cut or broken could not be copied
    table = Table(Column("episode", no_wrap=True), "task", "state", "reason", "reward", "turns' tokens", "trained")
    for view in views:
        reward = "–" if view.reward is None else f"{view.reward:g}"
        table.add_row(
            view.episode, view.task, view.state, view.reason, reward, str(view.num_sampled), str(view.trained)
        )
    return table


def _count_text(num_shown: int, num_found: int, num_all: int) -> str:
    """Example: "showing 200 of 1,984 episodes, the last ones; --all shows every one"."""
    found = f"{num_found:,} episodes" if num_found == num_all else f"{num_found:,} episodes found among {num_all:,}"
    cut = ", the last ones; --all shows every one" if num_shown < num_found else ""
    return f"showing {num_shown:,} of {found}{cut}"


def episode_tree(episode: Episode, view: EpisodeView, tokenizer: Tokenizer) -> Tree:
    reward = "no verdict" if episode.reward is None else f"reward {episode.reward:g}"
    root = Tree(Text(f"{episode.id}  {episode.order.task}  {episode.reason}, {reward}; {view.state}: {view.reason}"))
    nodes, turns = {-1: root}, EpisodeTree(episode.turns)
    for turn in episode.turns:
        nodes[turn.index] = nodes[turn.parent].add(_turn_text(turn, turns.departure(turn), tokenizer))
    return root


def _turn_text(turn: Turn, departure: int | None, tokenizer: Tokenizer) -> Text:
    sampled = turn.sampled
    mean = float(sampled.logprobs.mean()) if len(sampled) else 0.0
    versions = sorted({int(version) for version in sampled.versions})
    text = Text()
    text.append(f"turn {turn.index}: {len(turn.context)} new prompt tokens, {len(sampled)} sampled, ", style="dim")
    text.append(f"{turn.finish_reason}, mean logprob {mean:.3f}, version {versions}\n", style="dim")
    if departure is not None:
        text.append(f"leaves what turn {turn.continues} saw and said at token {departure}\n", style="yellow")
    text.append(tokenizer.decode(turn.context.ids.tolist()).strip() + "\n", style="cyan")
    text.append(tokenizer.decode(sampled.ids.tolist()), style="bold")
    return text
