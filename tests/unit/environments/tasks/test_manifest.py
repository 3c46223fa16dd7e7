import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.environments.tasks.manifest import parse_manifest
from everlong.environments.tasks.toml_writer import write_toml

OLD = (
    'version = "1.0"\n[metadata]\nx = [1, 2.5]\n[environment]\nmemory = "1.5G"\nallow_internet = false\nodd = "kept"\n'
)
NEW = """\
schema_version = "1.4"
surprise = { a = [{ b = 1 }] }
[task]
name = "org/t"
authors = [{ name = "A" }]
[verifier]
timeout_sec = 5
env = { "odd key" = "a\\"b\\\\c" }
[environment]
network_mode = "public"
"""


@pytest.mark.parametrize("text", [OLD, NEW], ids=["1.0", "1.4"])
def test_a_manifest_survives_a_round_trip(text: str):
    manifest = parse_manifest(text, "task.toml")
    assert parse_manifest(write_toml(manifest.data), "task.toml") == manifest


def test_an_old_file_is_read_as_todays_with_its_unknown_keys():
    data = parse_manifest(OLD, "task.toml").data
    assert data == {
        "schema_version": "1.4",
        "metadata": {"x": [1, 2.5]},
        "environment": {"memory_mb": 1536, "network_mode": "no-network", "odd": "kept"},
    }
    assert parse_manifest(OLD, "task.toml").ignored_keys == ("environment.odd",)
    assert parse_manifest(NEW, "task.toml").ignored_keys == ("surprise",)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | _TEXT
_VALUES = st.recursive(_SCALARS.filter(lambda value: value is not None), lambda inner: st.lists(inner, max_size=3)
                       | st.dictionaries(_TEXT, inner, max_size=3), max_leaves=8)  # fmt: skip


@given(st.dictionaries(_TEXT, _VALUES, max_size=4))
def test_toml_that_is_written_is_read_back(data: dict):
    assert tomllib.loads(write_toml(data)) == data


def test_what_toml_cannot_say_is_refused():
    with pytest.raises(TypeError, match="TOML has no form for a NoneType"):
        write_toml({"a": None})
