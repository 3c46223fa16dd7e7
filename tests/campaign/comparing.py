"""What a finished run left behind, in a form in which two runs can be compared."""

from __future__ import annotations

from pathlib import Path

import apsw
import blake3

from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import Episode, Record
from everlong.ledger import EpisodeFinished, EpisodeStarted, EpisodeStore, Fact, Ledger, read_lifecycle
from everlong.storage import open_store
from everlong.weights import WeightReader, fingerprint


class Outcome(Record, frozen=True, kw_only=True):
    weights: str
    """Fingerprint of the newest published version, computed from its bits."""
    version: int
    checkpoint: str
    """Hash of the exported files; empty for a model that has none."""
    batches: tuple[tuple[int, ...], ...]
    """Groups of every batch."""
    episodes: dict[str, str]
    """By name: a hash of everything that was sampled, and the reward."""
    tokens_trained: int
    num_facts: int


def outcome_of(path: Path) -> Outcome:
    """Of a run that has ended. Raises what a damaged store or ledger raises."""
    folder = RunFolder(path)
    store = open_store(folder.store_url(folder.read_config()))
    reader, lifecycle, episodes = WeightReader(store), read_lifecycle(folder.ledger), EpisodeStore(store)
    version = reader.latest()
    assert version is not None, f"{path} has published nothing"
    return Outcome(
        weights=fingerprint(reader.read(version)),
        version=version,
        checkpoint=_hash_files(folder.checkpoint),
        batches=tuple(view.groups for _, view in sorted(lifecycle.batches.items())),
        episodes={
            name: _hash_episode(episodes.get(view.payload_key, view.payload_hash))
            for name, view in sorted(lifecycle.episodes.items())
            if view.payload_key
        },
        tokens_trained=lifecycle.balance().tokens_trained,
        num_facts=num_facts(path),
    )


def facts_of(path: Path) -> list[Fact]:
    """All facts of a run that nobody drives; none where it has no ledger yet."""
    file = RunFolder(path).ledger
    if not file.exists():
        return []
    ledger = Ledger.open(file)
    try:
        return [entry.fact for entry in ledger.facts()]
    finally:
        ledger.close()


def num_facts(path: Path) -> int:
    """Of a run that somebody may be driving."""
    file = RunFolder(path).ledger
    if not file.exists():
        return 0
    try:
        connection = apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(1000)
            return connection.execute("SELECT max(seq) FROM facts").get or 0
        finally:
            connection.close()
    except apsw.Error:  # so young that it has no table yet
        return 0


def sampled_twice(facts: list[Fact]) -> list[str]:
    """Episodes that were started after they had finished."""
    finished: set[str] = set()
    again = []
    for fact in facts:
        if isinstance(fact, EpisodeFinished):
            finished.add(fact.episode)
        elif isinstance(fact, EpisodeStarted) and fact.episode in finished:
            again.append(f"{fact.episode} was sampled again after it had finished")
    return again


def differences(expected: Outcome, got: Outcome) -> list[str]:
    """What differs, a line each."""
    found = []
    if got.batches != expected.batches:
        found.append(f"batches hold the groups {got.batches}, expected {expected.batches}")
    changed = sorted(
        name
        for name in expected.episodes.keys() | got.episodes.keys()
        if got.episodes.get(name) != expected.episodes.get(name)
    )
    if changed:
        found.append(f"{len(changed)} episodes are others, first {changed[0]}")
    if got.tokens_trained != expected.tokens_trained:
        found.append(f"{got.tokens_trained} tokens were trained, expected {expected.tokens_trained}")
    if (got.version, got.weights) != (expected.version, expected.weights):
        found.append(
            f"the final weights are version {got.version} {got.weights}, expected {expected.version} {expected.weights}"
        )
    if got.checkpoint != expected.checkpoint:
        found.append("the exported checkpoint holds other weights")
    return found


def _hash_episode(episode: Episode) -> str:
    hasher = blake3.blake3(f"{episode.reward} {episode.reason}".encode())
    for turn in episode.turns:
        for columns in (turn.context, turn.sampled):
            for stream in (columns.ids, columns.logprobs, columns.versions, columns.sampled):
                hasher.update(stream.tobytes())
    return hasher.hexdigest(16)


def _hash_files(folder: Path) -> str:
    if not folder.exists():
        return ""
    hasher = blake3.blake3()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            hasher.update(path.name.encode()).update(path.read_bytes())
    return hasher.hexdigest(16)
