"""The folder of a run that starts: a run that is refused leaves nothing, and two never start in one folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.cli.store_owner import disown_store, local_store
from everlong.contracts.errors import WorkerDied, WorkerError


class FreshFolder:
    """Makes and locks the run's folder. Until `keep` an error takes back what was made since, whoever made it there.

    What stays: a run whose worker crashed, since its log tells why; and one that was stopped after its config was written,
    since it can be resumed. The lock is the folder's own, so that a killed process leaves none behind.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        self._kept = False

    def __enter__(self) -> FreshFolder:
        """Raises FileExistsError where a run lies or starts there, OSError where the folder cannot be made."""
        path = self._folder.path
        self._missing = [*_missing(path), *_missing(local_store(self._config, self._folder))]
        self._absent = [place for place in self._tasks() if not place.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder.refuse_run()
            self._there = frozenset(os.listdir(path))
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                raise FileExistsError(f"another run starts in {path} just now: choose another --output") from error
            self._remove_empty()
            raise
        return self

    def keep(self) -> None:
        """The run is under way."""
        self._kept = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not self._kept and self._takes_back(error):
                self._take_back()
        finally:
            os.close(self._lock)

    def _takes_back(self, error: BaseException) -> bool:
        if not self._folder.config.exists():
            return True
        return isinstance(error, Exception) and not isinstance(error, WorkerDied | WorkerError)

    def _take_back(self) -> None:
        disown_store(self._config, self._folder)
        path = self._folder.path
        for made in [*self._absent, *(path / name for name in os.listdir(path) if name not in self._there)]:
            if made.is_dir() and not made.is_symlink():
                shutil.rmtree(made)
            else:
                made.unlink(missing_ok=True)
        self._remove_empty()

    def _remove_empty(self) -> None:
        for place in self._missing:
            if place.is_dir() and not any(place.iterdir()):
                place.rmdir()

    def _tasks(self) -> list[Path]:
        paths = (*self._config.tasks.train, *self._config.tasks.eval)
        return [path for path in paths if path.is_relative_to(self._folder.path)]


def _missing(path: Path | None) -> list[Path]:
    """The path and the folders above it that do not exist, the innermost first."""
    return [] if path is None else [place for place in (path, *path.parents) if not place.exists()]
