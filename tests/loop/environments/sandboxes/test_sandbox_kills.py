"""A few kills of the campaign that `make campaign-sandboxes` is: nothing is left after the next start, and nobody else was touched."""

import pytest
from tests.campaign.sandboxes import Campaign, usable_kinds


@pytest.mark.parametrize("kind", ["namespaces", "none"])
def test_a_manager_killed_at_random_moments_leaves_nothing_for_long(tmp_path, kind):
    if kind not in usable_kinds():
        pytest.skip(f"this machine refuses {kind}")
    runs = list(Campaign(tmp_path, seed=1).run(3, [kind]))
    assert [failure for run in runs for failure in run.failures] == []
    assert any(run.num_folders for run in runs)
