"""Settings that cannot work are refused, and the light modules stay light."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from everlong.engines.config import EmbeddedConfig


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


def test_the_scripted_engine_and_every_setting_load_without_torch():
    """Takes a fresh interpreter, about half a second."""
    code = "import sys; sys.modules['torch'] = None; import everlong.engines.scripted, everlong.engines.config, everlong.engines.torch_engine.scheduler, everlong.engines.vllm_engine.engine"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 0, done.stderr
