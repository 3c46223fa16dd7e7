import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, MicroBatch, Purpose, Segment, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.trajectories.admission import AdmissionConfig, admit_group
from everlong.trajectories.credit import GroupMeanConfig, score_group
from everlong.trajectories.packing import PackingConfig, pack_batch, pack_supervised
from everlong.trajectories.tree import ROLES, EpisodeTree

CREDIT = GroupMeanConfig(scale="none")
KEEP_ALL = AdmissionConfig(zero_signal="keep", max_branches=50)


class Builder:
    """Gives every sampled token a logprob of its own, by which it can be found again in a batch."""

    def __init__(self):
        self.num_sampled = 0

    def turn(self, index, parent, context, sampled, role="main"):
        numbers = np.arange(self.num_sampled, self.num_sampled + len(sampled))
        self.num_sampled += len(sampled)
        columns = TokenColumns.sampled_tokens(sampled, -(numbers + 1) / 1024, version=1)
        return Turn(
            index=index,
            parent=parent,
            context=TokenColumns.context(context),
            sampled=columns,
            finish_reason=FinishReason.STOP,
            role=role,
        )


def episode(turns, *, group=0, attempt=0, reward=0.0):
    order = EpisodeOrder(task="t", group=group, attempt=attempt, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=reward), turns=tuple(turns))


def pack(groups, limit=1000, admission=KEEP_ALL, seed=0):
    scored = [score_group(number, "t", members, CREDIT) for number, members in groups.items()]
    return pack_batch(3, scored, PackingConfig(micro_batch_tokens=limit), admission, seed), scored


def path_tokens(micro_batch, token):
    """Indices of the tokens from the root to this one, with it, read off the segments alone."""
    number = next(i for i, s in enumerate(micro_batch.segments) if s.start <= token < s.start + s.length)
    segment = micro_batch.segments[number]
    path = list(range(segment.start, token + 1))
    while segment.parent >= 0:
        segment = micro_batch.segments[segment.parent]
        path = [*range(segment.start, segment.start + segment.length), *path]
    return path


def trained_tokens(batch):
    """Per trained token: number, the ids that stand before it and itself, credit, the episode that owns it, and its branch.

    A branch trains in one micro-batch, wherever its episode was cut.
    """
    found, homes = [], {}
    for micro_batch in batch.micro_batches:
        columns, positions = micro_batch.columns, micro_batch.positions()
        for token in np.flatnonzero(columns.trainable):
            path = path_tokens(micro_batch, token)
            assert positions[token] == len(path) - 1
            owner = next(s for s in micro_batch.segments if s.start <= token < s.start + s.length)
            number = round(-1024 * float(columns.logprobs[token])) - 1
            credit = float(columns.credit[token])
            episode = batch.episodes[owner.episode].episode
            found.append((number, columns.ids[path].tolist(), credit, episode, owner.branch))
            homes.setdefault((episode, owner.branch), id(micro_batch))
            assert homes[episode, owner.branch] == id(micro_batch)
    return sorted(found)


def test_prompt_is_stored_once_and_saves_a_third():
    build = Builder()
    prompt = list(range(10))
    members = [
        episode([build.turn(0, -1, prompt, [1, 2, 3, 4])], attempt=0, reward=1.0),
        episode([build.turn(0, -1, prompt, [5, 6, 7, 8, 9, 9])], attempt=1),
    ]
    packed, _ = pack({0: members})
    (micro_batch,) = packed.train_batch.micro_batches
    assert micro_batch.segments == (
        Segment(parent=-1, start=0, length=10, episode=-1),
        Segment(parent=0, start=10, length=4, episode=0),
        Segment(parent=0, start=14, length=6, episode=1),
    )
    assert micro_batch.columns.credit[[10, 13, 14, 19]].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert np.isnan(micro_batch.columns.credit[:10]).all()
    assert packed.stats["tokens/packed"] == 20 and packed.stats["tokens/saved"] == 10  # 14 + 16 flat
    assert packed.stats["packing/overlap_ratio"] == pytest.approx(0.3333, abs=1e-4)
    assert packed.stats["packing/fill"] == 20 / 1000


FORKED = [(0, -1, [0, 1], [2, 3]), (1, 0, [9], [4]), (2, 0, [8], [5, 6])]


def test_shared_turn_is_trained_once_in_one_micro_batch():
    build = Builder()
    members = [episode([build.turn(*t) for t in FORKED], reward=1.0), episode([], attempt=1)]
    packed, _ = pack({0: members})
    (micro_batch,) = packed.train_batch.micro_batches
    columns = micro_batch.columns
    assert sorted(columns.ids[columns.trainable].tolist()) == [2, 3, 4, 5, 6]
    assert packed.train_batch.num_trainable == 5
    assert packed.train_batch.episodes[0].num_trainable == 5


def test_an_episode_larger_than_the_limit_stays_whole_and_passes_in_parts():
    build = Builder()
    members = [episode([build.turn(*t) for t in FORKED], reward=1.0), episode([], attempt=1)]
    packed, _ = pack({0: members}, limit=7)
    (micro_batch,) = packed.train_batch.micro_batches
    columns = micro_batch.columns
    assert len(columns) == 9 and micro_batch.pass_tokens == 7
    assert sorted(columns.ids[columns.trainable].tolist()) == [2, 3, 4, 5, 6]
    assert columns.num_sampled == columns.num_trainable
    (fits,) = pack({0: members}, limit=9)[0].train_batch.micro_batches
    assert fits.pass_tokens is None and fits.columns == columns


def test_single_chain_of_turns_is_one_segment():
    build = Builder()
    chain = [build.turn(i, i - 1, [1, 2], [3, 4, 5]) for i in range(20)]
    packed, _ = pack({0: [episode(chain, reward=1.0), episode([], attempt=1)]})
    assert packed.train_batch.micro_batches[0].segments == (Segment(parent=-1, start=0, length=100, episode=0),)


def test_every_turn_of_an_episode_gets_its_credit():
    build = Builder()
    chain = [build.turn(0, -1, [1], [2, 3]), build.turn(1, 0, [4], [5])]
    packed, _ = pack({0: [episode(chain, reward=1.0), episode([build.turn(0, -1, [1], [6])], attempt=1)]})
    credits = {number: credit for number, _, credit, *_ in trained_tokens(packed.train_batch)}
    assert credits == {0: 0.5, 1: 0.5, 2: 0.5, 3: -0.5}


def test_same_ids_sampled_by_two_episodes_are_never_merged():
    build = Builder()
    members = [episode([build.turn(0, -1, [1], [2, 3])], attempt=i, reward=float(i)) for i in range(2)]
    packed, _ = pack({0: members})
    assert packed.train_batch.num_trainable == 4
    assert [s.episode for s in packed.train_batch.micro_batches[0].segments] == [-1, 0, 1]


def test_dropped_thinking_shares_the_prompt_and_nothing_that_was_sampled():
    prompt = [90, 1, 40, 91, 10, 90, 2]
    build = Builder()
    first = build.turn(0, -1, prompt, [50, 60, 51, 61, 91])
    second = build.turn(1, -1, [*prompt, 61, 91, 10, 90, 1, 41, 91, 10, 90, 2], [50, 62, 51, 63, 91])
    packed, _ = pack({0: [episode([first, second], reward=1.0), episode([], attempt=1)]})
    (micro_batch,) = packed.train_batch.micro_batches
    assert [(s.parent, s.length) for s in micro_batch.segments] in (
        [(-1, 7), (0, 5), (0, 15)],
        [(-1, 7), (0, 15), (0, 5)],
    )
    assert micro_batch.columns.num_trainable == 10


def test_tree_that_is_too_big_is_split_by_episode_with_the_prompt_again():
    build = Builder()
    prompt = list(range(10))
    members = [episode([build.turn(0, -1, prompt, [1] * 8)], attempt=i, reward=float(i)) for i in range(4)]
    packed, _ = pack({0: members}, limit=30)
    assert [len(m.columns) for m in packed.train_batch.micro_batches] == [26, 26]
    assert packed.train_batch.num_trainable == 32
    assert all(not m.columns.trainable[:10].any() for m in packed.train_batch.micro_batches)


def test_episodes_are_packed_apart_where_the_shared_prompt_again_costs_less_than_another_forward_pass():
    build = Builder()
    long = episode([build.turn(0, -1, [1], [2] * 20)], reward=1.0)
    short = episode([build.turn(0, -1, [1], [2] * 7)], attempt=1)
    packed, _ = pack({0: [long, short]}, limit=8)  # in parts 28 * 4 / 3, apart 21 * 4 / 3 + 8
    assert [(len(m.columns), m.pass_tokens) for m in packed.train_batch.micro_batches] == [(21, 8), (8, None)]
    assert packed.stats["packing/fill"] > 1


def test_a_long_prompt_passes_once_where_that_costs_less_than_to_repeat_it():
    build = Builder()
    members = [episode([build.turn(0, -1, range(30), [1, 2])], attempt=i, reward=float(i)) for i in range(4)]
    packed, _ = pack({0: members}, limit=33)  # in parts 38 * 4 / 3, apart 4 * 32
    assert [(len(m.columns), m.pass_tokens) for m in packed.train_batch.micro_batches] == [(38, 33)]
    assert packed.stats["tokens/saved"] == 4 * 32 - 38


def test_number_of_episodes_need_not_divide_by_anything():
    build = Builder()
    groups = {
        g: [episode([build.turn(0, -1, [g], [1] * (1 + i))], group=g, attempt=i, reward=float(i)) for i in range(3)]
        for g in range(7)
    }
    packed, _ = pack(dict(reversed(groups.items())), limit=10)
    shares = packed.train_batch.episodes
    assert [share.episode for share in shares] == [f"train-{g:06d}-{i:03d}" for g in range(7) for i in range(3)]
    assert sorted(number for number, *_ in trained_tokens(packed.train_batch)) == list(range(build.num_sampled))


def test_batch_without_anything_to_train_has_no_micro_batch_and_names_every_token():
    build = Builder()
    members = [episode([build.turn(0, -1, [1], [2, 3])], attempt=i) for i in range(2)]
    packed, _ = pack({0: members}, admission=AdmissionConfig())
    assert packed.train_batch.micro_batches == () and packed.train_batch.episodes == ()
    assert packed.outcomes["train-000000-001"].discarded == {"zero_signal": 2}
    assert packed.stats["tokens/discarded/zero_signal"] == 4


def test_group_that_comes_twice_is_refused():
    group = score_group(0, "t", [episode([]), episode([], attempt=1)], CREDIT)
    with pytest.raises(ValueError, match="each group once"):
        pack_batch(0, [group, group], PackingConfig(), AdmissionConfig(), 0)


@st.composite
def batches(draw):
    build, groups = Builder(), {}
    ids = st.lists(st.integers(0, 1), max_size=4)
    for group in range(draw(st.integers(1, 3))):
        members = []
        for attempt in range(draw(st.integers(1, 4))):
            tree = EpisodeTree()
            for index in range(draw(st.integers(0, 5))):
                parent = draw(st.integers(-1, index - 1))
                context = draw(ids) if parent >= 0 else [0, *draw(ids)]
                turn = build.turn(index, parent, context, draw(ids), draw(st.sampled_from(ROLES)))
                tree = EpisodeTree([*tree.turns, turn])
            reward = draw(st.sampled_from([0.0, 1.0, None]))
            members.append(episode(tree.turns, group=group, attempt=attempt, reward=reward))
        groups[group] = members
    return groups


def expected_tokens(scored, admission, seed):
    """What must train, from the episodes: number, ids that the engine saw before it and itself, credit, episode, and the
    first admitted branch that it lies on."""
    expected = []
    for group in scored:
        for admitted in admit_group(group, admission, seed):
            tree = EpisodeTree(admitted.episode.turns)
            first = {}
            for place, branch in enumerate(admitted.branches):
                first = dict.fromkeys(branch.path, place) | first
            for index, branch in first.items():
                columns = tree.columns(admitted.episode.turns[index])
                for token in range(len(columns) - len(admitted.episode.turns[index].sampled), len(columns)):
                    number = round(-1024 * float(columns.logprobs[token])) - 1
                    credit = float(np.float32(admitted.credit))
                    expected.append((number, columns.ids[: token + 1].tolist(), credit, admitted.episode.id, branch))
    return sorted(expected)


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(1, 40), st.integers(1, 5), st.sampled_from(["drop", "keep"]), st.randoms())
def test_each_admitted_token_is_trained_once_behind_what_its_engine_saw(groups, limit, max_branches, zero, random):
    admission = AdmissionConfig(zero_signal=zero, max_branches=max_branches)
    packed, scored = pack(groups, limit, admission)
    batch = packed.train_batch
    assert trained_tokens(batch) == expected_tokens(scored, admission, 0)

    for micro_batch in batch.micro_batches:
        ends = [segment.start + segment.length for segment in micro_batch.segments]
        assert [segment.start for segment in micro_batch.segments] == [0, *ends[:-1]] and ends[-1] == len(
            micro_batch.columns
        )
        assert all(s.length and s.parent < i for i, s in enumerate(micro_batch.segments))
        assert micro_batch.columns.num_trainable
        assert micro_batch.pass_tokens == (limit if len(micro_batch.columns) > limit else None)

    sampled = [m.columns.logprobs[m.columns.sampled].tolist() for m in batch.micro_batches]
    assert len({number for numbers in sampled for number in numbers}) == sum(map(len, sampled)), "none is packed again"
    trained = {share.episode: share.num_trainable for share in batch.episodes}
    for members in groups.values():
        for member in members:
            outcome = packed.outcomes[member.id]
            assert outcome.trained == trained.get(member.id, 0)
            assert outcome.trained + sum(outcome.discarded.values()) == member.num_sampled
    assert batch.num_trainable == sum(m.columns.num_trainable for m in batch.micro_batches)

    shuffled = {
        number: random.sample(members, len(members))
        for number, members in random.sample(list(groups.items()), len(groups))
    }
    again, _ = pack(shuffled, limit, admission)
    assert [m.segments for m in again.train_batch.micro_batches] == [m.segments for m in batch.micro_batches]
    assert [m.columns for m in again.train_batch.micro_batches] == [m.columns for m in batch.micro_batches]
    assert again.outcomes == packed.outcomes and again.stats == packed.stats


def logprobs_of_a_toy_policy(micro_batch: MicroBatch):
    """A bigram whose prediction also depends on all that stands before: any leak between branches shows."""
    return np.array(
        [
            math.log1p(
                sum((i + 1) * int(micro_batch.columns.ids[t]) for i, t in enumerate(path_tokens(micro_batch, token)))
            )
            for token in range(len(micro_batch.columns))
        ]
    )


def test_loss_does_not_depend_on_how_the_batch_is_cut():
    build = Builder()
    prompt = [3, 1, 4]
    groups = {
        g: [
            episode(
                [build.turn(0, -1, prompt, [1, 5]), build.turn(1, 0, [9], [2, 6]), build.turn(2, 0, [8], [g])],
                group=g,
                attempt=i,
                reward=float(i),
            )
            for i in range(3)
        ]
        for g in range(2)
    }
    losses = set()
    for limit in (5, 9, 20, 1000):
        packed, _ = pack(groups, limit)
        terms = [
            logprobs_of_a_toy_policy(m)[m.columns.trainable] * m.columns.credit[m.columns.trainable]
            for m in packed.train_batch.micro_batches
        ]
        losses.add(round(math.fsum(np.concatenate(terms)) / packed.train_batch.num_trainable, 12))
    assert len(losses) == 1


def trace(prompt, answer, tail=()):
    return TokenColumns.context(prompt) + TokenColumns.supervised(answer) + TokenColumns.context(tail)


def test_supervised_traces_share_their_prompt_and_train_every_label_once():
    traces = [("a", trace([1, 2, 3], [4, 5], [6])), ("b", trace([1, 2, 7], [8]) + trace([9], [10]))]
    batch = pack_supervised(0, traces, PackingConfig(micro_batch_tokens=100))
    (micro_batch,) = batch.micro_batches
    assert micro_batch.segments == (
        Segment(parent=-1, start=0, length=2, episode=-1),
        Segment(parent=0, start=2, length=4, episode=0),
        Segment(parent=0, start=6, length=4, episode=1),
    )
    assert micro_batch.columns.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert micro_batch.columns.ids[micro_batch.columns.trainable].tolist() == [4, 5, 8, 10]
    assert [(s.episode, s.group, s.num_trainable) for s in batch.episodes] == [("a", -1, 2), ("b", -1, 2)]
    assert micro_batch.columns.num_sampled == 0 and np.isnan(micro_batch.columns.logprobs).all()


def test_supervised_traces_fill_micro_batches_up_to_the_limit():
    traces = [(str(i), trace([i, i], [1, 2])) for i in range(5)]
    batch = pack_supervised(0, traces, PackingConfig(micro_batch_tokens=8))
    assert [len(m.columns) for m in batch.micro_batches] == [8, 8, 4]
    assert sum(m.columns.num_trainable for m in batch.micro_batches) == batch.num_trainable == 10


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([("a", TokenColumns.context([1, 2]))], "at least one trainable token"),
        ([("a", TokenColumns.supervised([1, 2]))], "needs a prompt"),
        ([("a", trace([1], [2])), ("a", trace([1], [2]))], "each trace once"),
        ([("a", trace([1], [2]) + TokenColumns.sampled_tokens([3], [-0.1], version=0))], "packed as a group"),
    ],
    ids=["nothing to train", "no prompt", "twice", "sampled"],
)
def test_trace_that_teaches_nothing_is_refused(traces, message):
    with pytest.raises(ValueError, match=message):
        pack_supervised(0, traces, PackingConfig())
