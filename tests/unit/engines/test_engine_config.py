"""Settings that cannot work are refused, and the light modules stay light."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from everlong.cli.arguments import parse_config
from everlong.cli.config import RunConfig
from everlong.cli.toml import read_config, write_config
from everlong.engines.config import EmbeddedConfig, PoolConfig, VllmConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            {"block_tokens": 16, "cache_tokens": 100}, "multiple of block_tokens, got 100 and 16", id="ragged cache"
        ),
        pytest.param(
            {"cache_tokens": 64, "max_context": 65}, "cache_tokens 64 must hold", id="cache below one request"
        ),
        pytest.param({"max_running": 0}, "max_running", id="nobody runs"),
        pytest.param({"blocks": 3}, "blocks", id="unknown key"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        EmbeddedConfig(**settings)


def test_the_context_is_the_models_unless_it_is_set():
    assert EmbeddedConfig().context(4096) == 4096
    assert EmbeddedConfig(max_context=100).context(4096) == 100
    with pytest.raises(ValueError, match="max_context 5000 exceeds the 4096 positions"):
        EmbeddedConfig(max_context=5000).context(4096)
    with pytest.raises(ValueError, match="cache_tokens 32 must hold"):
        EmbeddedConfig(cache_tokens=32).context(4096)


def test_a_pool_names_its_members_and_has_the_context_of_the_smallest():
    pool = PoolConfig(members=(EmbeddedConfig(), VllmConfig(max_context=100), EmbeddedConfig(max_context=200)))
    assert pool.names == ("0-embedded", "1-vllm", "2-embedded")
    assert pool.context(4096) == 100
    with pytest.raises(ValueError, match="exceeds the 50 positions"):
        pool.context(50)


def test_a_pool_is_read_back_from_the_file_that_a_run_writes(tmp_path):
    pool = PoolConfig(members=(EmbeddedConfig(max_running=7), VllmConfig(url="http://host:1")), mismatch_bound=0.2)
    config = RunConfig(engine=pool)
    write_config(config, tmp_path / "config.toml")
    assert read_config(tmp_path / "config.toml") == config


def test_a_pool_is_written_as_tables_or_on_the_command_line(tmp_path):
    (tmp_path / "run.toml").write_text(
        '[engine]\ntype = "pool"\n[[engine.members]]\nmax_running = 7\ntype = "embedded"\n[[engine.members]]\ntype = "vllm"\n'
    )
    expected = PoolConfig(members=(EmbeddedConfig(max_running=7), VllmConfig()))
    assert parse_config(["@", str(tmp_path / "run.toml")]).engine == expected
    members = '[{"type": "embedded", "max_running": 7}, {"type": "vllm"}]'
    given = parse_config(["--model.type", "toy", "--engine.type", "pool", "--engine.members", members])
    assert given.engine == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"members": []}, "members", id="nobody"),
        pytest.param({"members": [{"type": "pool", "members": []}]}, "members", id="a pool in a pool"),
        pytest.param({"members": [{"type": "embedded"}], "mismatch_bound": 0.0}, "mismatch_bound", id="no bound"),
        pytest.param({"members": [{"type": "vllm", "max_runing": 3}]}, "max_runing", id="unknown key of a member"),
    ],
)
def test_pools_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"engine": {"type": "pool", **settings}})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        pytest.param({"numerics": "aligned"}, "take engines of type embedded only", id="aligned"),
        pytest.param({"sampling": {"top_p": 0.9}}, "an engine of type vllm gives only", id="kept sets"),
        pytest.param({"adapter": {"type": "lora"}}, "an engine of type vllm loads whole weights", id="adapters"),
        pytest.param({"model": {"type": "scripted"}}, "engine.type=pool has no effect", id="scripted"),
    ],
)
def test_what_one_member_cannot_give_the_pool_cannot(run, message):
    members = [{"type": "embedded"}, {"type": "vllm"}]
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({**run, "engine": {"type": "pool", "members": members}})


def test_the_scripted_engine_and_every_setting_load_without_torch():
    """Takes a fresh interpreter, about half a second."""
    code = "import sys; sys.modules['torch'] = None; import everlong.engines.scripted, everlong.engines.config, everlong.engines.torch_engine.scheduler, everlong.engines.vllm_engine.engine, everlong.engines.pool.pool"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
