"""What is wrong with a run's settings, in the words of who wrote them."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from everlong.cli.config import RunConfig
from everlong.contracts.config import Config


def explain(error: ValidationError) -> str:
    """One line per mistake: the option, what is wrong, what came, and for an unknown name the nearest known one."""
    return "\n".join(_lines(error))


def _lines(error: ValidationError) -> Iterator[str]:
    mistakes = error.errors()
    for mistake in mistakes:
        option, kinds, kind = _option_of(mistake["loc"])
        if mistake["type"] == "extra_forbidden" and "[" in option:
            yield _unknown_in_a_list(option, str(mistake["loc"][-1]), kinds, kind)
        elif mistake["type"] == "extra_forbidden":
            near = nearest_option(option)
            if near == option:
                yield f"{option} is no setting of type {kind}"
            else:
                yield f"there is no setting {option}: " + (
                    f"did you mean {near}?" if near else "`everlong train --help` lists them"
                )
        elif mistake["type"] != "too_short" or not any(_within(other["loc"], mistake["loc"]) for other in mistakes):
            message = _message(mistake)
            came = "" if isinstance(mistake["input"], dict | BaseModel) else f", got {mistake['input']!r}"
            yield f"{option}: {message}{came}" if option else message


def _within(place: tuple[int | str, ...], group: tuple[int | str, ...]) -> bool:
    """A list counts what was right in it only, so one whose items are wrong is called too short besides."""
    return len(place) > len(group) and place[: len(group)] == group


def _message(mistake: ErrorDetails) -> str:
    match mistake["type"]:
        case "tuple_type" | "list_type":
            came = f", got {mistake['input']!r}" if isinstance(mistake["input"], dict) else ""
            return f"expected a list, written in [ ]{came}"
        case "too_short":
            return f"expected {mistake['ctx']['min_length']} or more of them"
        case _:
            return mistake["msg"].removeprefix("Value error, ")


def _unknown_in_a_list(option: str, name: str, kinds: list[type[Config]], kind: str) -> str:
    """What stands in a list is no option, and is written as in a file."""
    of_kind = [known for known in kinds if known.model_fields["type"].default == kind] if kind else kinds
    near = difflib.get_close_matches(name, [field for known in of_kind for field in known.model_fields], 1)
    hint = f": did you mean {near[0]}?" if near else ""
    return f"{option.rpartition('.')[0]}: {name} is no setting" + (f" of type {kind}" if kind else "") + hint


def _option_of(path: tuple[int | str, ...]) -> tuple[str, list[type[Config]], str]:
    """The option behind the place of a mistake, what its group may be, and which of that it is: a place names the variant, an
    option does not. An item of a list is `--group[0]`, and what stands in it `--group[0].name`, with the names of a file."""
    option, chosen = "", ""
    kinds: list[type[Config]] = [RunConfig]
    group: list[type[Config]] = []
    of_group: list[object] = []
    for part in path:
        tags = {kind.model_fields["type"].default for kind in kinds if "type" in kind.model_fields}
        if len(kinds) > 1 and part in tags:
            chosen = str(part)
            continue
        group = kinds
        if isinstance(part, int):
            option += f"[{part}]"
            kinds = [kind for annotation in of_group for kind in _items(annotation)]
            continue
        name = part if "[" in option else part.replace("_", "-")
        option = f"{option}.{name}" if option else f"--{name}"
        of_group = [kind.model_fields[part].annotation for kind in kinds if part in kind.model_fields]
        kinds = [kind for annotation in of_group for kind in variants(annotation)]
    return option, group, chosen


def _items(annotation: object) -> list[type[Config]]:
    """The config classes of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [kind for part in typing.get_args(annotation) for kind in _items(part)]


def nearest_option(option: str) -> str | None:
    """The known option, or group of options, whose own name is most like the last part of this one; of equals the one whose group
    is most like its group, else the first."""

    def likeness(candidate: str) -> tuple[float, ...]:
        pairs = zip(_parts(option), _parts(candidate), strict=True)
        group, name = (difflib.SequenceMatcher(None, mine, theirs).ratio() for mine, theirs in pairs)
        return name, group

    best = max(option_names(RunConfig), key=likeness)
    return best if likeness(best)[0] >= 0.6 else None


def _parts(option: str) -> tuple[str, str]:
    """Group and own name."""
    group, _, name = option.removeprefix("--").rpartition(".")
    return group, name


def option_names(kind: type[Config], prefix: str = "--") -> Iterator[str]:
    """Names of every setting and group; those of all variants where a group has several."""
    for name, field in kind.model_fields.items():
        option = prefix + name.replace("_", "-")
        yield option
        for child in variants(field.annotation):
            yield from option_names(child, option + ".")


def variants(annotation: object) -> list[type[Config]]:
    """The config classes that a field may hold; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [kind for part in getattr(annotation, "__args__", ()) if isinstance(part, type) for kind in variants(part)]
