"""Where a run keeps its things, and its resolved config on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from everlong.cli.config import RunConfig
from everlong.cli.origin import RunOrigin, read_origin, write_origin
from everlong.cli.toml import read_config, write_config
from everlong.contracts.import_path import look_in


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def origin(self) -> Path:
        return self.path / "origin.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.db"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The trained model in the layout of Hugging Face, written when the run ends."""
        return self.path / "checkpoint"

    @property
    def adapter(self) -> Path:
        """The trained adapters in the layout of PEFT, where the run trains some."""
        return self.checkpoint / "adapter"

    def store_url(self, config: RunConfig) -> str:
        return config.weights.store or str(self.path / "store")

    def absolute_store_url(self, config: RunConfig) -> str:
        """The same store for a process that works in another folder."""
        url = self.store_url(config)
        return url if "://" in url else str(Path(url).expanduser().resolve())

    def refuse_run(self) -> None:
        """Raises FileExistsError where a run lies there."""
        if self.config.exists():
            raise FileExistsError(
                f"{self.path} holds a run already: `everlong resume {self.path}` goes on with it, or choose another --output"
            )

    def create(self, config: RunConfig, origin: RunOrigin | None = None) -> None:
        """Make the folder and write the config, which makes it a run. Raises FileExistsError where a run lies there."""
        self.refuse_run()
        self.path.mkdir(parents=True, exist_ok=True)
        if origin is not None:
            write_origin(origin, self.origin)
        write_config(config, self.config)

    def read_origin(self) -> RunOrigin | None:
        """None for a run that wrote none. Raises ValueError where it is damaged."""
        return read_origin(self.origin)

    def open(self) -> RunConfig:
        """The run's config; from here on its own code is found in the folder that it was started from.

        Raises FileNotFoundError where there is no run, ValueError where its config is damaged.
        """
        config = self.read_config()
        if (origin := self.read_origin()) is not None:
            look_in(origin.started_in)
        return config

    def read_config(self) -> RunConfig:
        """Raises FileNotFoundError where there is no run, ValueError where its config is damaged."""
        if not self.config.is_file():
            raise FileNotFoundError(f"expected a run's folder with config.toml, found none in {self.path}")
        return read_config(self.config)
