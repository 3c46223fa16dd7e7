"""What is asked of a vLLM server, and which of its answers are believed. Chunks as vLLM 0.32 sends them."""

import json

import numpy as np
import pytest

from everlong.contracts.errors import EngineError
from everlong.contracts.records import FinishReason, GenerateRequest, SamplingKey, SamplingParams
from everlong.engines.vllm_engine.engine import read_gauges
from everlong.engines.vllm_engine.protocol import Transcript, check_supported, generate_body, num_candidates
from everlong.engines.vllm_engine.restarts import Restarts

TOKEN_BYTES = [bytes([ord("a") + i]) for i in range(20)]


def request(**params):
    return GenerateRequest(
        request_id="train-000000-000.0.1",
        key=SamplingKey(run_seed=1, episode="train-000000-000", turn=1),
        prompt_ids=np.array([1, 2, 3], np.int32),
        params=SamplingParams(**{"max_tokens": 8, **params}),
    )


def chunk(ids, logprobs=None, top=None, **more):
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    content = [
        {"token_id": i, "logprob": p, "rank": 1, "top_logprobs": top or [{"token_id": i, "logprob": p, "rank": 1}]}
        for i, p in zip(ids, logprobs, strict=False)
    ]
    choice = {"index": 0, "finish_reason": None, "stop_reason": None, "token_ids": ids, "routed_experts": None}
    return json.dumps(
        {"request_id": "x", "usage": None, "choices": [{**choice, "logprobs": {"content": content}, **more}]}
    )


def end(ids, spans=((4, 0, None),), finish="length", **more):
    versions = [{"version": str(v), "start": a, "end": len(ids) if b is None else b} for v, a, b in spans]
    return chunk(ids, finish_reason=finish, weight_versions=versions, **more)


def heard(asked, *chunks):
    transcript = Transcript(asked, TOKEN_BYTES)
    for data in chunks:
        transcript.feed(data)
    return transcript.reply()


def test_a_request_is_asked_in_ids_with_the_runs_sampling_and_its_own_seed():
    body = generate_body(
        request(temperature=0.7, top_k=3, stop_ids=(5,)), wire_id="w", max_tokens=6, vocab_size=20, cache_salt="f"
    )
    asked = body["sampling_params"]
    assert (body["token_ids"], body["cache_salt"], body["request_id"]) == ([1, 2, 3], "f", "w")
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (0.7, 1.0, 3, 6)
    assert (asked["stop_token_ids"], asked["ignore_eos"], asked["detokenize"]) == ([5], True, False)
    assert 0 <= asked["seed"] < 1 << 63
    other = generate_body(request(), wire_id="w", max_tokens=6, vocab_size=20, cache_salt="f")
    assert other["sampling_params"]["seed"] == asked["seed"]


def test_a_reply_in_parts_is_one_turn_with_the_version_of_each_token():
    reply = heard(request(), chunk([7]), end([8, 9], spans=((3, 0, 1), (4, 1, 3))), '{"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}}')  # fmt: skip
    assert reply.columns.ids.tolist() == [7, 8, 9]
    assert reply.columns.versions.tolist() == [3, 4, 4]
    assert reply.columns.logprobs.tolist() == [-0.5] * 3
    assert (reply.finish_reason, reply.num_cached_tokens) == (FinishReason.LENGTH, 2)
    assert reply.num_reported == 4  # which a session refuses, since it got three
    assert reply.request_id == "train-000000-000.0.1"


def test_a_stop_id_is_named_and_kept():
    reply = heard(request(stop_ids=(9,)), end([7, 9], finish="stop", stop_reason=9))
    assert (reply.finish_reason, reply.stop_match, reply.columns.ids.tolist()) == (FinishReason.STOP, 9, [7, 9])


def test_a_stop_string_ends_the_turn_at_the_token_that_completes_it():
    transcript = Transcript(request(stop_strings=("bc",)), TOKEN_BYTES)
    assert not transcript.feed(chunk([0, 1]))
    assert transcript.feed(chunk([2, 7]))
    transcript.feed(end([8], spans=((4, 0, 5),), finish="abort"))
    reply = transcript.reply()
    assert reply.columns.ids.tolist() == [0, 1, 2]
    assert (reply.finish_reason, reply.stop_match) == (FinishReason.STOP, "bc")
    assert len(reply.columns.versions) == 3


def test_what_was_sampled_before_an_abort_is_the_reply():
    reply = heard(request(), chunk([7, 8]), end([], spans=((4, 0, 2),), finish="abort"))
    assert (reply.finish_reason, reply.columns.ids.tolist()) == (FinishReason.ABORT, [7, 8])


def candidates(kept, left_out):
    return [{"token_id": i, "logprob": -1.0} for i in kept] + [{"token_id": i, "logprob": -9999.0} for i in left_out]


def test_the_kept_set_is_what_truncation_left_of_the_likeliest():
    reply = heard(request(top_k=2), end([7], top=candidates([7, 3], [4, 5])))
    assert reply.columns.kept.row(0).tolist() == [3, 7]


def test_tokens_that_tie_with_the_last_kept_one_are_in_the_kept_set():
    reply = heard(request(top_k=2), end([7], top=candidates([7, 3, 11], [4])))
    assert reply.columns.kept.row(0).tolist() == [3, 7, 11]


def test_a_kept_set_that_goes_on_beyond_the_candidates_is_refused():
    with pytest.raises(EngineError, match="kept at least 3 tokens for top_k=2"):
        heard(request(top_k=2), end([7], top=candidates([7, 3, 11], [])))


def test_where_every_token_is_a_candidate_all_may_be_kept():
    reply = heard(request(top_k=30), end([7], top=candidates(range(20), [])))
    assert len(reply.columns.kept.row(0)) == num_candidates(SamplingParams(top_k=30), 20) == 20


def test_a_sampling_mask_of_a_gpu_server_is_the_kept_set():
    reply = heard(request(top_p=0.9), end([7], sampling_mask=[[2, 7]]))
    assert reply.columns.kept.row(0).tolist() == [2, 7]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        pytest.param([end([1, 2, 3], logprobs=[-1.0, -1.0])], "3 ids with 2 logprobs", id="a logprob too few"),
        pytest.param([end([1], logprobs=[-9999.0])], "id 1 without a logprob", id="no logprob"),
        pytest.param([chunk([1])], "finish_reason None", id="truncation not reported"),
        pytest.param([end([1], finish="stop")], "stopped at None", id="a stop of its own"),
        pytest.param(
            [end([1, 2], spans=((4, 0, 1),))], "version of 1 tokens and sampled 2", id="token without version"
        ),
        pytest.param([end([1], spans=(("default", 0, 1),))], "do not fit", id="weights of no version"),
        pytest.param([end([1, 2], spans=((3, 0, 1), (4, 0, 2)))], "do not fit", id="overlapping spans"),
        pytest.param(['{"error": {"message": "EngineCore died", "code": 500}}'], "EngineCore died", id="error"),
        pytest.param(['{"choices": ['], "cannot be read", id="no JSON"),
        pytest.param(['{"choices": [{"token_ids": ["1"]}]}'], "cannot be read", id="other types"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_by_name(chunks, message):
    with pytest.raises(EngineError, match=f"train-000000-000.0.1.*{message}"):
        heard(request(), *chunks)


def test_a_mask_without_the_sampled_token_is_refused():
    with pytest.raises(EngineError, match="lacks the sampled id 7"):
        heard(request(top_p=0.9), end([7], sampling_mask=[[2, 3]]))


def test_what_vllm_would_sample_otherwise_is_refused():
    with pytest.raises(ValueError, match="temperature below 0.01"):
        check_supported(SamplingParams(temperature=0.005), returns_sampling_mask=False)
    with pytest.raises(ValueError, match="top_p=0.9 only where top_k bounds it"):
        check_supported(SamplingParams(top_p=0.9), returns_sampling_mask=False)
    check_supported(SamplingParams(top_p=0.9), returns_sampling_mask=True)
    check_supported(SamplingParams(top_p=0.9, top_k=5), returns_sampling_mask=False)


def test_only_losses_in_a_row_use_up_the_restarts():
    restarts = Restarts(limit=2)
    assert [restarts.lost(), restarts.lost()] == [True, True]
    restarts.answered()
    assert [restarts.lost(), restarts.lost(), restarts.lost()] == [True, True, False]
    assert restarts.total == 5


def test_gauges_are_summed_over_engines_and_others_left_out():
    text = "# TYPE x gauge\nvllm:num_requests_waiting{engine=\"0\"} 2.0\nvllm:num_requests_waiting{engine=\"1\"} 3.0\nvllm:kv_cache_usage_perc 0.25\nprocess_x 7\nvllm:other 1\n"  # fmt: skip
    assert read_gauges(text) == {"server_waiting": 5.0, "cache_used": 0.25}
