"""No setting is accepted and then forgotten: each is in the resolved file, and some code reads it."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

import everlong
from everlong.cli.config import RunConfig
from everlong.cli.toml import config_text
from everlong.engines.config import VllmConfig
from everlong.trainer.config import GrpoConfig, RatioConfig, SapoConfig, TokenMask, TokenTruncation

TWO_UPDATES = {"updates_per_batch": 2}
EVERY_TYPE = [
    RunConfig(loss=SapoConfig()),
    RunConfig(engine=VllmConfig()),
    RunConfig(loss=GrpoConfig(), ratio=RatioConfig(base="proximal", correction=TokenMask()), trainer=TWO_UPDATES),
    RunConfig(ratio=RatioConfig(base="proximal", correction=TokenTruncation()), trainer=TWO_UPDATES),
]
"""Every type of every union at least once."""


def leaves(settings: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def names_that_are_read() -> set[str]:
    """Attributes that code reads, leaving out what only checks settings against each other."""
    names: set[str] = set()
    for path in Path(everlong.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        checks = {id(inner) for node in ast.walk(tree) if is_check(node) for inner in ast.walk(node)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in checks}
    return names


def is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("validator" in ast.unparse(d) for d in node.decorator_list)


def test_every_setting_is_in_the_resolved_file():
    for config in EVERY_TYPE:
        written = tomllib.loads(config_text(config))
        for path in leaves(config):
            table = written
            for name in path:
                assert name in table, ".".join(path)
                table = table[name]


def test_no_setting_is_accepted_and_never_read():
    # parses the whole source, which takes a third of a second
    paths = {path for config in EVERY_TYPE for path in leaves(config)}
    read = names_that_are_read()
    assert [".".join(path) for path in sorted(paths) if path[-1] not in read] == []
