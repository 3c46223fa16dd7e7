"""What is wrong with a run's settings, in the words of who wrote them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from pydantic import BaseModel, ValidationError

from everlong.cli.config import RunConfig
from everlong.contracts.config import Config


def explain(error: ValidationError) -> str:
    """One line per mistake: the option, what is wrong, what came, and for an unknown name the nearest known one."""
    return "\n".join(_lines(error))


def _lines(error: ValidationError) -> Iterator[str]:
    for mistake in error.errors():
        option, kind = _option_of(mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            near = nearest_option(option)
            if near == option:
                yield f"{option} is no setting of type {kind}"
            else:
                yield f"there is no setting {option}: " + (
                    f"did you mean {near}?" if near else "`everlong train --help` lists them"
                )
        else:
            message = mistake["msg"].removeprefix("Value error, ")
            came = "" if isinstance(mistake["input"], dict | BaseModel) else f", got {mistake['input']!r}"
            yield f"{option}: {message}{came}" if option else message


def _option_of(path: tuple[int | str, ...]) -> tuple[str, str]:
    """The option behind the place of a mistake, and the variant of its group: a place names the variant, an option does not."""
    names, kinds, chosen = [], [RunConfig], ""
    for part in path:
        tags = {kind.model_fields["type"].default for kind in kinds if "type" in kind.model_fields}
        if len(kinds) > 1 and part in tags:
            chosen = str(part)
            continue
        names.append(str(part).replace("_", "-"))
        fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
        kinds = [kind for field in fields for kind in variants(field.annotation)]
    return ("--" + ".".join(names) if names else ""), chosen


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
