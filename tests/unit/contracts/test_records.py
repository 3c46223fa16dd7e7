import msgspec
import numpy as np
import pytest

from everlong.contracts.config import Config
from everlong.contracts.errors import Reason
from everlong.contracts.records import (
    Episode,
    EpisodeOrder,
    EpisodeShare,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MicroBatch,
    Purpose,
    SamplingKey,
    SamplingParams,
    ScoredColumns,
    ScoredGroup,
    Segment,
    TrainBatch,
    Turn,
    Verdict,
    decode_record,
    encode_record,
)
from everlong.contracts.tokens import NO_ENGINE, KeptSets, TokenColumns

ORDER = EpisodeOrder(task="toy/a", group=4, attempt=2, purpose=Purpose.TRAIN, min_policy_version=9)
ANSWER = TokenColumns.sampled_tokens(
    [5, 7], [-0.1, -0.25], version=[3, 4], temperature=0.7, kept=KeptSets.from_rows([[5], [2, 7]])
)
TURN = Turn(index=0, parent=-1, context=TokenColumns.context([1, 2]), sampled=ANSWER, finish_reason=FinishReason.STOP)
EPISODE = Episode(
    order=ORDER, reason=Reason.DONE, verdict=Verdict(reward=1.0), turns=(TURN,), num_discarded=3, metrics={"x": 1.5}
)


def test_an_episode_stored_before_there_were_pools_is_read_with_tokens_of_no_named_engine():
    plain = msgspec.msgpack.decode(encode_record(EPISODE))
    for columns in (plain["turns"][0]["context"], plain["turns"][0]["sampled"]):
        del columns["engines"]
    back = decode_record(msgspec.msgpack.encode(plain), Episode)
    assert back.turns[0].sampled == ANSWER
    assert back.turns[0].sampled.engines.tolist() == [NO_ENGINE] * 2


def test_episode_keeps_every_stream_on_the_wire():
    back = decode_record(encode_record(EPISODE), Episode)
    assert encode_record(back) == encode_record(EPISODE)
    assert back.turns[0].sampled == ANSWER and back.turns[0].context == TURN.context
    assert back.turns[0].sampled.kept.row(1).tolist() == [2, 7]
    assert back.order == ORDER and back.verdict == EPISODE.verdict and back.reason is Reason.DONE


def test_request_and_reply_keep_ids_and_logprobs_on_the_wire():
    key = SamplingKey(run_seed=1, episode=ORDER.episode, turn=0)
    request = GenerateRequest(
        request_id="r", key=key, prompt_ids=np.int32([1, 2]), params=SamplingParams(stop_ids=(91,))
    )
    back = decode_record(encode_record(request), GenerateRequest)
    assert back.prompt_ids.tolist() == [1, 2] and back.prompt_ids.dtype == np.int32
    assert back.key == key and back.params == request.params
    reply = GenerateReply(request_id="r", columns=ANSWER, finish_reason=FinishReason.STOP, stop_match=91)
    back = decode_record(encode_record(reply), GenerateReply)
    assert back.columns == ANSWER and back.stop_match == 91


def test_batch_and_scores_keep_everything_on_the_wire():
    kept = KeptSets(ids=np.int32([1, 5]), offsets=np.int64([0, 0, 2]), logprobs=np.float32([-0.5, -0.9]))
    answer = ANSWER.with_credit(0.5).replace(returns=np.float32([0.25, 1.0]), kept=kept)
    columns = TURN.context + answer
    micro_batch = MicroBatch(columns=columns, segments=(Segment(parent=-1, start=0, length=4, episode=0),))
    share = EpisodeShare(
        episode=ORDER.episode, group=4, num_trainable=2, reward=0.0, truncated=True, continued_by=(1, -1)
    )
    batch = TrainBatch(batch=0, micro_batches=(micro_batch,), episodes=(share,))
    back = decode_record(encode_record(batch), TrainBatch)
    assert back.micro_batches[0].columns == columns
    assert back.micro_batches[0].segments == micro_batch.segments and back.episodes == (share,)
    scores = ScoredColumns(values=(np.float32([np.nan, -0.5]),), policy_version=2)
    back = decode_record(encode_record(scores), ScoredColumns)
    np.testing.assert_array_equal(back.values[0], scores.values[0])
    assert back.logprobs is None and back.values_after is None, "absent stays absent"


def test_columns_stored_before_a_stream_was_known_are_read_as_absent():
    fields = msgspec.msgpack.decode(encode_record(ANSWER))
    del fields["returns"], fields["kept"]["logprobs"]
    back = decode_record(msgspec.msgpack.encode(fields), TokenColumns)
    assert back == ANSWER and np.isnan(back.returns).all() and back.kept.logprobs is None


def test_credit_none_stays_apart_from_credit_zero_on_the_wire():
    group = ScoredGroup(group=4, task="toy/a", episodes=(EPISODE, EPISODE), credits=(None, 0.0))
    assert decode_record(encode_record(group), ScoredGroup).credits == (None, 0.0)


def test_bytes_of_something_else_are_refused():
    with pytest.raises(ValueError):
        decode_record(b"\x93\x01\x02\x03", Episode)
    with pytest.raises(ValueError):
        decode_record(encode_record(EPISODE)[:-4], Episode)


def test_record_whose_streams_lost_step_on_the_wire_is_refused():
    raw = msgspec.msgpack.decode(encode_record(EPISODE))
    raw["turns"][0]["sampled"]["logprobs"] = ["<f4", [1], np.float32([-0.1]).tobytes()]  # of two tokens
    with pytest.raises(ValueError, match="length of the ids"):
        decode_record(msgspec.msgpack.encode(raw), Episode)


def test_failure_of_ours_never_teaches_even_with_a_reward():
    failed = msgspec.structs.replace(EPISODE, reason=Reason.SANDBOX_CRASH)
    assert EPISODE.reward == 1.0 and failed.reward is None


def test_sampled_tokens_count_whether_or_not_a_turn_holds_them():
    assert EPISODE.num_sampled == 2 + 3


def test_positions_count_from_the_root_along_the_path():
    segments = (
        Segment(parent=-1, start=0, length=3, episode=-1),
        Segment(parent=0, start=3, length=2, episode=0),
        Segment(parent=1, start=5, length=1, episode=0),
        Segment(parent=0, start=6, length=2, episode=1),
        Segment(parent=-1, start=8, length=2, episode=2),
    )
    micro_batch = MicroBatch(columns=TokenColumns.context(range(10)), segments=segments)
    assert micro_batch.positions().tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 0, 1]


def test_incarnation_does_not_change_the_episode():
    again = msgspec.structs.replace(ORDER, incarnation=1)
    assert again.episode == ORDER.episode == "train-000004-002"


def test_config_refuses_unknown_keys_and_changes():
    class ToyConfig(Config):
        size: int = 1

    with pytest.raises(ValueError):
        ToyConfig(sise=2)
    with pytest.raises(ValueError):
        ToyConfig().size = 2
