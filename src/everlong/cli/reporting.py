"""The report of a run: curves as PNG, and one page with curves, evaluations, ledger, timings and a few episodes."""

from __future__ import annotations

from pathlib import Path

from everlong.cli.rendering import make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import Episode, Purpose
from everlong.ledger import EpisodeStore, EpisodeView, check_ledger, read_lifecycle
from everlong.observe import EpisodeText, TurnText, plot_curves, write_report
from everlong.rollouts.renderers.tokenizers import Tokenizer
from everlong.storage import open_store

NUM_EPISODES = 4
CURVES = ("reward", "success", "entropy", "grad_norm")


def write_run_report(folder: RunFolder) -> Path:
    """Raises FileNotFoundError where there is no run."""
    config = folder.read_config()
    store = EpisodeStore(open_store(folder.store_url(config)))
    tokenizer = make_renderer(config).tokenizer
    views = read_lifecycle(folder.ledger).episodes.values()
    episodes = [
        episode_text(store.get(view.payload_key, view.payload_hash), tokenizer) for view in _telling(list(views))
    ]
    if folder.metrics.exists():
        plot_curves(folder.metrics, folder.path / "curves.png", metrics=CURVES)
    balance = check_ledger(folder.ledger).balance
    return write_report(folder.path, balance=balance.tables(), episodes=episodes)


def _telling(views: list[EpisodeView]) -> list[EpisodeView]:
    """A success and a failure from the beginning, and from the end, where there are such."""
    graded = [v for v in views if v.payload_key and v.reward is not None and v.purpose is Purpose.TRAIN]
    wanted = []
    for ordered in (graded, graded[::-1]):
        for good in (False, True):
            wanted += [view for view in ordered if (view.reward or 0) >= 1 == good][:1]
    return list({view.episode: view for view in wanted}.values())[:NUM_EPISODES]


def episode_text(episode: Episode, tokenizer: Tokenizer) -> EpisodeText:
    turns = []
    for turn in episode.turns:
        turns.append(TurnText(role="context", text=tokenizer.decode(turn.context.ids.tolist())))
        turns.append(TurnText(role="assistant", text=tokenizer.decode(turn.sampled.ids.tolist())))
    reward = "no verdict" if episode.reward is None else f"reward {episode.reward:g}"
    return EpisodeText(
        title=f"{episode.id}  {episode.order.task}", outcome=f"{episode.reason}, {reward}", turns=tuple(turns)
    )
