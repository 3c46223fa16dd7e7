"""From the words behind `everlong train` to a run's config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from everlong.cli.config import RunConfig
from everlong.cli.ineffective import options_given, take_back_ineffective
from everlong.cli.mistakes import explain
from everlong.cli.quickstart import quickstart_config, quickstart_tasks
from everlong.environments.tasks.config import TasksConfig

DRY_RUN = "--dry-run"
DESCRIPTION = f"""\
Train. Without a file: the quickstart, SmolLM2-135M on terminal tasks, in a quarter of an hour on two cores.

everlong train                                          the quickstart
everlong train --model.type toy                         the quickstart on a model of 1.5M parameters over bytes
everlong train @ run.toml                               a run described by a file
everlong train @ run.toml --sampling.temperature 0.8    with one setting changed
everlong train @ run.toml {DRY_RUN}                     print the resolved file and stop

The file is TOML with a table per group of options: [sampling] with temperature = 0.8. "None" stands for nothing.
Defaults are those of a file; the quickstart has its own, which `everlong train {DRY_RUN}` prints."""


def parse_config(arguments: Sequence[str], command: str = "train") -> RunConfig:
    """The resolved config. Raises ValueError for a file that cannot be read, and for settings that are unknown (with the
    nearest name), invalid or without effect. `--help` prints every setting and exits."""
    from pydantic_config import ConfigFileError, cli

    arguments = _apart(arguments)
    _refuse_repeats(arguments)
    _refuse_loose_files(arguments, command)
    default = None if any(word.startswith("@") for word in arguments) else quickstart_config(_model_type(arguments))
    try:
        with options_given(_settings(arguments)):
            # the overloads of the library leave out `prog` and `description`
            config = cli(  # ty: ignore[no-matching-overload]
                RunConfig, args=list(arguments), default=default, prog=f"everlong {command}", description=DESCRIPTION
            )
    except ConfigFileError as error:
        cause = error.__cause__
        raise ValueError(explain(cause) if isinstance(cause, ValidationError) else error.message) from error
    except OSError as error:
        raise ValueError(f"expected a TOML file after @: {error}") from error
    config = take_back_ineffective(config)
    return config if default is None else _with_own_tasks(config, default.tasks, _settings(arguments))


def _apart(arguments: Sequence[str]) -> list[str]:
    """`--name=value` as two words: in a table of several types the library takes the whole for a name."""
    words = []
    for word in arguments:
        name, equals, value = word.partition("=")
        words += [name, value] if equals and name.startswith("--") and not value.startswith("--") else [word]
    return words


def _refuse_repeats(arguments: Sequence[str]) -> None:
    """The last one would win in silence. Raises ValueError."""
    options = [word.split("=", 1)[0] for word in arguments if word.startswith("--")]
    for option, count in Counter(options).items():
        if count > 1:
            raise ValueError(f'option {option} is given {count} times: give it once, several paths as \'["a", "b"]\'')


def _refuse_loose_files(arguments: Sequence[str], command: str) -> None:
    """A file that no @ stands before, where no option takes it. Raises ValueError that shows the form."""
    for before, word in pairwise(["", *arguments]):
        takes_it = before.startswith("--") and not before.startswith("--no-") and "=" not in before
        if word.startswith(("-", "@")) or before == "@" or takes_it:
            continue
        if word.endswith(".toml") or Path(word).is_file():
            raise ValueError(f"a file of settings comes after @: `everlong {command} @ {word}`")


def _model_type(arguments: Sequence[str]) -> str:
    """Which model the command line asks for; the quickstart's where it asks for none."""
    words = [part for word in arguments for part in word.split("=", 1)]
    return next((value for name, value in pairwise(words) if name == "--model.type"), "smollm2")


def _settings(arguments: Sequence[str]) -> frozenset[str]:
    """Dotted names of what the command line itself sets; `--group @ file` is a file's."""
    words = [word for word in pairwise([*arguments, ""]) if word[0].startswith("--") and not word[1].startswith("@")]
    names = (word.split("=", 1)[0].removeprefix("--").removeprefix("no-") for word, _ in words)
    return frozenset(name.replace("-", "_") for name in names)


def _with_own_tasks(config: RunConfig, default: TasksConfig, given: frozenset[str]) -> RunConfig:
    """The quickstart makes its tasks inside the run's folder, wherever that was moved; named tasks stay, and the quickstart's
    number of demonstrations, which is a share of its own tasks, goes with those."""
    own, named = quickstart_tasks(config.output), config.tasks
    changes: dict[str, object] = {
        "tasks": TasksConfig(
            train=own.train if named.train == default.train else named.train,
            eval=own.eval if named.eval == default.eval else named.eval,
        )
    }
    if named.train != default.train and not given & {"warmup", "warmup.num_tasks"}:
        changes["warmup"] = config.warmup.model_copy(update={"num_tasks": None})
    return config.model_copy(update=changes)
