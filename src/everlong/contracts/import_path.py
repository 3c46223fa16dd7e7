"""Names of code: `package.module:name`. How a config points at a part that is not ours."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

PATTERN = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
ImportPath = Annotated[str, Field(pattern=rf"^{PATTERN}$")]


def look_in(folder: str) -> None:
    """Look for modules there as well: before the working folder, which may hold others of the same name."""
    if folder not in sys.path:
        working = (place for place, entry in enumerate(sys.path) if entry in ("", os.getcwd()))
        sys.path.insert(next(working, len(sys.path)), folder)


def call_named(path: str, function: Callable[..., Any], *arguments: object) -> Any:
    """What the code that `path` names gives. Raises ValueError where it would end the process, and what it raises otherwise."""
    try:
        return function(*arguments)
    except SystemExit as error:
        raise ValueError(
            f"{path} called sys.exit({error.code!r}) where a part of the run was expected: let it raise what is wrong, and keep a "
            "script's main part below `if __name__ == '__main__'`"
        ) from error


def load_named(path: str) -> Any:
    """What `package.module:name` names, looked for among installed packages and in the folder that we were started from.

    Raises ValueError for a path of another form and for what is not there. An error of the module's own goes through.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ValueError(f"expected a path of the form package.module:name, got {path!r}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found = call_named(path, importlib.import_module, module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and misses one of its own
        raise ValueError(
            f"{path}: there is no module {error.name} among the installed packages or in {here}: install it, or start from "
            "the folder that holds it"
        ) from error
    if not hasattr(found, name):
        near = ", ".join(sorted(word for word in vars(found) if not word.startswith("_"))[:12])
        raise ValueError(f"{path}: module {module} has no {name}; it has {near or 'nothing'}")
    return getattr(found, name)
