"""Settings that cannot have an effect, or would count something twice, are refused."""

import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from everlong.trainer.config import (
    GrpoConfig,
    LossConfig,
    RatioConfig,
    SapoConfig,
    TokenMask,
    TokenTruncation,
    TrainerConfig,
    check_effective,
)


@pytest.mark.parametrize("loss", [SapoConfig(), GrpoConfig()], ids=["sapo", "grpo"])
def test_a_loss_that_cannot_change_the_gradient_is_refused(loss):
    with pytest.raises(ValueError, match=r"no effect.*Set ratio.base to behaviour, or trainer.updates_per_batch to 2"):
        check_effective(loss, RatioConfig(base="proximal"), 1)


def test_effective_settings_pass():
    check_effective(SapoConfig(), RatioConfig(base="proximal"), 2)
    check_effective(SapoConfig(), RatioConfig(), TrainerConfig().updates_per_batch)


@pytest.mark.parametrize("correction", [TokenTruncation(), TokenMask()], ids=["truncation", "mask"])
def test_a_correction_on_the_behaviour_base_would_count_twice(correction):
    with pytest.raises(ValidationError, match=r"count twice.*ratio.base to proximal"):
        RatioConfig(correction=correction)
    assert RatioConfig(base="proximal", correction=correction).correction == correction


def test_the_type_chooses_the_loss():
    loss = TypeAdapter(LossConfig)
    assert loss.validate_python({"type": "grpo", "clip_high": 0.3}) == GrpoConfig(clip_high=0.3)
    assert loss.validate_python({"type": "sapo"}) == SapoConfig(tau_positive=1.0, tau_negative=1.05, reduction="token")
    with pytest.raises(ValidationError, match="clip_high"):
        loss.validate_python({"type": "sapo", "clip_high": 0.3})


def test_settings_load_no_torch():
    code = "import sys, everlong.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
