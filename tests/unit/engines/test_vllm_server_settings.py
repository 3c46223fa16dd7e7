"""How a vLLM server is started from settings, and which settings are refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from everlong.cli.config import RunConfig, SamplingConfig
from everlong.engines.config import OWN_ARGUMENTS, VllmConfig
from everlong.engines.vllm_engine.server import ServedModel, find_python, server_command, server_environment

MODEL = ServedModel({}, "bfloat16", 512)


def command(**settings):
    return list(server_command(Path("py"), VllmConfig(**settings), MODEL, Path("m"), Path("s")))


def test_the_server_gets_the_context_and_the_dtype_of_the_run():
    words = command()
    assert words[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[words.index("--max-model-len") + 1] == "512"
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "processed_logprobs" in words


@pytest.mark.parametrize(
    ("settings", "gone", "come"),
    [
        ({"max_running": 7}, ["64"], ["7"]),
        ({"cache_mb": 2}, [str(1024 << 20)], [str(2 << 20)]),
        ({"prefix_cache": False}, ["--enable-prefix-caching"], ["--no-enable-prefix-caching"]),
        ({"compile": True}, ["--enforce-eager"], []),
        ({"arguments": ("--tensor-parallel-size", "8")}, [], ["--tensor-parallel-size", "8"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_setting_changes_the_command(settings, gone, come):
    before, after = command(), command(**settings)
    assert [word for word in before if word not in after] == gone
    assert [word for word in after if word not in before] == come


def test_every_word_that_settings_decide_is_refused_among_further_arguments():
    flags = {word.split("=")[0] for word in [*command(), *command(prefix_cache=False)] if word.startswith("--")}
    assert flags - set(OWN_ARGUMENTS) == {"--disable-uvicorn-access-log"}
    with pytest.raises(ValidationError, match="arguments holds --dtype=float16"):
        VllmConfig(arguments=("--dtype=float16",))


def test_the_threads_of_the_run_are_the_servers():
    assert server_environment(2)["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS" not in server_environment(None)


def test_settings_of_a_server_that_somebody_else_runs_are_refused():
    with pytest.raises(ValidationError, match="max_running, compile of the engine has no effect"):
        VllmConfig(url="http://host:8000", max_running=7, compile=True)
    assert VllmConfig(url="http://host:8000", max_context=100).context(512) == 100


def test_a_machine_without_vllm_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("EVERLONG_VLLM", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"the default names .venv-vllm/bin/python.*make vllm"):
        find_python(None)
    monkeypatch.setenv("EVERLONG_VLLM", str(tmp_path / "no"))
    with pytest.raises(ValueError, match="EVERLONG_VLLM names"):
        find_python(None)
    with pytest.raises(ValueError, match=r"engine.python names other"):
        find_python(Path("other"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numerics": "aligned"}, "numerics=aligned"),
        ({"sampling": SamplingConfig(top_p=0.9)}, "kept set of every token.*sampling.top_k"),
        ({"model": {"type": "scripted"}}, "no effect with model.type=scripted"),
        ({"engine": VllmConfig(max_context=5000)}, "exceeds the 4096 positions"),
    ],
    ids=["aligned", "top-p alone", "scripted", "context"],
)
def test_what_vllm_cannot_give_is_refused_before_anything_starts(settings, message):
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"engine": VllmConfig(), **settings})


def test_top_p_is_taken_where_the_kept_set_is_known():
    RunConfig(engine=VllmConfig(), sampling=SamplingConfig(top_p=0.9, top_k=40))
    RunConfig(engine=VllmConfig(arguments=("--return-sampling-mask",)), sampling=SamplingConfig(top_p=0.9))
