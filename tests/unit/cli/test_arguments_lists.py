"""Options that take several values, and options given twice."""

import pytest

from everlong.cli.arguments import parse_config


def test_several_task_folders_are_a_list_on_the_command_line_too():
    config = parse_config(["--tasks.train", '["a", "b"]', "--tasks.eval", '["c"]'])
    assert [str(path) for path in config.tasks.train] == ["a", "b"] and len(config.tasks.eval) == 1


def test_an_option_given_twice_is_refused_instead_of_the_last_winning():
    with pytest.raises(ValueError, match="--tasks.train is given 2 times"):
        parse_config(["--tasks.train", "a", "--tasks.train", "b"])


def test_the_quickstart_runs_without_a_network_too():
    assert parse_config(["--model.type", "scripted", "--warmup.num-batches", "1"]).model.type == "scripted"
