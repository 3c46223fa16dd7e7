"""Settings that cannot have an effect, or would count something twice, are refused."""

import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from everlong.trainer.config import (
    CispoConfig,
    DapoConfig,
    DoubleSidedMask,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    KlConfig,
    KlReward,
    LossConfig,
    MisPo,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    TokenMask,
    TokenTruncation,
    TrainerConfig,
    check_effective,
    check_projection,
    ignores_staleness,
)
from everlong.trainer.kl_config import WITHOUT_KL

WITH_RATIO = [GrpoConfig(), DrGrpoConfig(), DapoConfig(), CispoConfig(), GspoConfig(), GspoTokenConfig(), SapoConfig(), KimiConfig()]  # fmt: skip


def name(config):
    return config.type


def check(loss, ratio, updates=1, kl=WITHOUT_KL):
    check_effective(loss, ratio, updates, kl)


@pytest.mark.parametrize("loss", WITH_RATIO, ids=name)
def test_a_loss_that_cannot_change_the_gradient_is_refused(loss):
    with pytest.raises(
        ValueError, match=rf"loss {loss.type} has no effect.*Set ratio.base to behaviour, or trainer.upd"
    ):
        check(loss, RatioConfig(base="proximal"))
    check(loss, RatioConfig(base="proximal"), 2)
    check(loss, RatioConfig(), TrainerConfig().updates_per_batch)


@pytest.mark.parametrize("correction", [TokenTruncation(), TokenMask(), MisPo()], ids=name)
@pytest.mark.parametrize("loss", WITH_RATIO, ids=name)
def test_a_correction_on_the_behaviour_base_would_count_twice(loss, correction):
    with pytest.raises(ValueError, match=rf"{correction.type} weighs: with loss {loss.type} it would count twice"):
        check(loss, RatioConfig(correction=correction))
    check(loss, RatioConfig(base="proximal", correction=correction), 2)
    check(ReinforceConfig(), RatioConfig(correction=correction))


def test_the_current_ratio_is_weighed_for_a_loss_without_one_only():
    check(ReinforceConfig(), RatioConfig(correction=DoubleSidedMask()))
    with pytest.raises(ValueError, match="double_sided weighs the current p/q, which loss grpo holds"):
        check(GrpoConfig(), RatioConfig(base="proximal", correction=DoubleSidedMask()), 2)


def test_a_loss_without_ratio_has_no_base_to_choose():
    with pytest.raises(ValueError, match="ratio.base=proximal has no effect with loss reinforce"):
        check(ReinforceConfig(), RatioConfig(base="proximal"), 2)


@pytest.mark.parametrize("loss", [GspoConfig(), GrpoConfig(level="sequence"), CispoConfig(level="sequence")], ids=str)
def test_a_reward_of_each_token_needs_a_ratio_of_each_token(loss):
    with pytest.raises(ValueError, match="kl.type=reward gives each token a credit of its own"):
        check(loss, RatioConfig(), kl=KlReward())
    check(GspoTokenConfig(), RatioConfig(), kl=KlReward())


@pytest.mark.parametrize("kind", ["sapo", "kimi", "reinforce", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_a_level_that_a_loss_has_not_is_refused_by_name(kind, level):
    with pytest.raises(
        ValidationError, match=f"loss {kind} is defined on each token's own ratio, got loss.level={level}"
    ):
        TypeAdapter(LossConfig).validate_python({"type": kind, "level": level})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "loss", "estimator": "k1"}, "k1 with kl.type=loss has no effect: the expected gradient .* is 0"),
        (
            {"type": "reward", "estimator": "unbiased"},
            "unbiased is defined by its gradient, which a reward does not have",
        ),
        ({"type": "none", "coefficient": 1.0}, "coefficient"),
        ({"type": "loss", "support": "mixed"}, "'kept' or 'full'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value.get("estimator", value["type"])),
)
def test_a_kl_term_without_the_gradient_it_promises_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(KlConfig).validate_python(settings)


def test_a_constant_length_goes_with_its_reduction_only():
    for settings in ({"reduction": "constant"}, {"constant_length": 8}):
        with pytest.raises(ValidationError, match="go together"):
            GrpoConfig(**settings)
    assert GrpoConfig(reduction="constant", constant_length=8).constant_length == 8
    with pytest.raises(ValidationError, match="'sequence' or 'episode'"):
        GspoConfig(reduction="token")


def test_a_projection_beside_another_logit_gradient_is_refused():
    check_projection(TrainerConfig(logit_projection="mean"), RatioConfig())
    check_projection(TrainerConfig(), RatioConfig(score_centring=True))
    with pytest.raises(
        ValueError, match="trainer.logit_projection=mean acts on .*, and ratio.score_centring adds another"
    ):
        check_projection(TrainerConfig(logit_projection="mean"), RatioConfig(score_centring=True))


def test_a_filter_without_bounds_is_refused():
    with pytest.raises(ValidationError, match="mis_po without any bound has no effect"):
        MisPo(token_low=None, token_high=None, sequence_low=None, sequence_high=None)


@pytest.mark.parametrize(
    ("loss", "ratio", "why"),
    [
        (GrpoConfig(), RatioConfig(), None),
        (GrpoConfig(), RatioConfig(base="proximal", correction=TokenMask()), None),
        (ReinforceConfig(), RatioConfig(correction=TokenMask()), None),
        (GrpoConfig(), RatioConfig(base="proximal"), "takes the trainer's own logprobs for the sampler's"),
        (ReinforceConfig(), RatioConfig(), "weighs no token by the policy that sampled it"),
    ],
    ids=["ratio", "corrected ratio", "corrected", "own logprobs", "nothing"],
)
def test_what_hides_staleness_is_known(loss, ratio, why):
    found = ignores_staleness(loss, ratio)
    assert (found is None) if why is None else (why in found)


def test_the_type_chooses_the_loss():
    loss = TypeAdapter(LossConfig)
    assert loss.validate_python({"type": "grpo", "clip_high": 0.3}) == GrpoConfig(clip_high=0.3)
    assert loss.validate_python({"type": "sapo"}) == SapoConfig(tau_positive=1.0, tau_negative=1.05, reduction="token")
    with pytest.raises(ValidationError, match="clip_high"):
        loss.validate_python({"type": "sapo", "clip_high": 0.3})


def test_settings_load_no_torch():
    code = "import sys, everlong.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
