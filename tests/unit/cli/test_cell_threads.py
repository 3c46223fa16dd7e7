"""By how many a machine's threads are divided for a cell, and for each rank of its trainer."""

import pytest

from everlong.cli.cell import _Making
from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.models.source import find_model
from everlong.storage import open_store


@pytest.mark.parametrize(
    ("schedule", "numerics", "ranks", "cell", "rank"),
    [
        ("rounds", "fast", 1, 1, 1),
        ("rounds", "fast", 4, 1, 4),
        ("rounds", "aligned", 4, 4, 4),
        ("async", "fast", 1, 2, 2),
        ("async", "fast", 3, 2, 6),
        ("async", "aligned", 3, 6, 6),
    ],
)
def test_an_engine_has_all_threads_of_its_cell_unless_it_must_give_the_trainer_s_bits(
    tmp_path, schedule, numerics, ranks, cell, rank
):
    config = RunConfig.model_validate(
        {"schedule": {"type": schedule}, "numerics": numerics, "trainer": {"ranks": ranks}}
    )
    making = _Making(config, find_model(config.model), open_store("memory://"), RunFolder(tmp_path))
    assert (making.share, making.share_of_rank) == (cell, rank)
