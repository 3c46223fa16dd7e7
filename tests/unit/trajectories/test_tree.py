import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.trajectories.tree import EpisodeTree, check_episode

STOP = FinishReason.STOP


def answer(*ids, logprob=-0.1, version=0):
    return TokenColumns.sampled_tokens(ids, [logprob] * len(ids), version=version)


def episode_of(tree_or_turns, **fields):
    turns = tree_or_turns.turns if isinstance(tree_or_turns, EpisodeTree) else tuple(tree_or_turns)
    order = EpisodeOrder(task="t", group=0, attempt=0, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=1.0), turns=turns, **fields)


def test_next_prompt_stores_only_what_is_new():
    tree = EpisodeTree()
    first = tree.add([20, 21], TokenColumns.sampled_tokens([5, 6], [-0.1, -0.2], version=1), STOP)
    second = tree.add([20, 21, 5, 6, 30], answer(8), STOP)
    assert second.parent == first.index and second.context.ids.tolist() == [30]
    assert tree.path(second) == [0, 1]
    assert tree.prompt_ids(second).tolist() == [20, 21, 5, 6, 30]
    columns = tree.columns(second)
    assert columns.ids.tolist() == [20, 21, 5, 6, 30, 8]
    assert columns.trainable.tolist() == [False, False, True, True, False, True]
    np.testing.assert_array_equal(columns.logprobs[2:4], np.float32([-0.1, -0.2]))
    assert tree.num_forks == 0


def test_history_that_was_encoded_again_drifts_where_it_deviates():
    tree = EpisodeTree()
    tree.add([20, 21], answer(5, 6), STOP)
    assert tree.drift([20, 21, 7, 30]) == 2
    assert tree.drift([20, 21, 5, 6, 30]) is None
    assert tree.drift([20]) is None
    assert tree.drift([40, 41]) is None


def test_history_that_was_encoded_again_forks_and_leaves_what_was_sampled():
    tree = EpisodeTree()
    first = tree.add([20, 21], answer(5, 6), STOP)
    second = tree.add([20, 21, 7, 30], answer(8), STOP)
    assert (second.parent, second.continues, tree.num_forks) == (-1, first.index, 1)
    assert second.context.ids.tolist() == [20, 21, 7, 30] and second.context.num_trainable == 0
    assert tree.columns(first).ids.tolist() == [20, 21, 5, 6]


def test_fork_hangs_below_the_deepest_turn_that_matches_whole():
    tree = EpisodeTree()
    tree.add([1], answer(2), STOP)
    tree.add([1, 2, 3], answer(4, 5), STOP)
    third = tree.add([1, 2, 3, 4, 6, 7], answer(8), STOP)
    assert (third.parent, third.continues, tree.num_forks) == (0, 1, 1)
    assert third.context.ids.tolist() == [3, 4, 6, 7]


THINK_PROMPT = [90, 1, 40, 91, 10, 90, 2]
THINK_ONE, THINK_TWO = [50, 60, 51, 61, 91], [50, 62, 51, 63, 91]
NEXT_QUESTION = [10, 90, 1, 41, 91, 10, 90, 2]


def test_thinking_that_stays_in_history_makes_one_branch():
    tree = EpisodeTree()
    tree.add(THINK_PROMPT, answer(*THINK_ONE), STOP)
    last = tree.add(THINK_PROMPT + THINK_ONE + NEXT_QUESTION, answer(*THINK_TWO), STOP)
    assert tree.columns(last).num_trainable == 10
    assert tree.num_forks == 0


def test_thinking_that_history_drops_makes_two_branches_that_train_each_sampled_token_once():
    tree = EpisodeTree()
    first = tree.add(THINK_PROMPT, answer(*THINK_ONE), STOP)
    second = tree.add([*THINK_PROMPT, 61, 91, *NEXT_QUESTION], answer(*THINK_TWO), STOP)
    assert (second.parent, second.continues, tree.num_forks) == (-1, 0, 1)
    branches = [tree.columns(first), tree.columns(second)]
    assert sum(branch.num_trainable for branch in branches) == 10
    survivors = branches[1].slice(7, 9)
    assert survivors.ids.tolist() == [61, 91] and survivors.num_trainable == 0


def test_end_token_appended_by_the_gateway_is_context_of_the_next_turn():
    tree = EpisodeTree()
    tree.add([1], answer(7, 8, 9), STOP)
    second = tree.add([1, 7, 8, 9, 91, 10], answer(5), STOP)
    assert tree.columns(second).trainable.tolist() == [False, True, True, True, False, False, True]


def test_same_prompt_sampled_again_is_a_sibling_and_no_fork():
    tree = EpisodeTree()
    tree.add([1, 2], answer(3), STOP)
    again = tree.add([1, 2], answer(4), STOP)
    assert (again.parent, again.continues, tree.num_forks) == (-1, -1, 0)
    assert tree.add([1, 2, 4, 9], answer(5), STOP).parent == again.index


def test_sub_agent_that_shares_an_opening_is_no_fork():
    tree = EpisodeTree()
    tree.add([90, 1, 5], answer(6), STOP)
    sub = tree.add([90, 1, 8], answer(9), STOP, role="sub_agent")
    assert (sub.parent, sub.continues, tree.num_forks) == (-1, -1, 0)


def test_compaction_names_the_turn_that_it_continues_and_is_no_fork():
    tree = EpisodeTree()
    tree.add([90, 1, 5], answer(6), STOP)
    compacted = tree.add([90, 1, 8], answer(9), STOP, continues=0)
    assert (compacted.parent, compacted.continues, tree.num_forks) == (-1, 0, 0)


def test_cut_off_answer_goes_on_without_new_context():
    tree = EpisodeTree()
    tree.add([1], answer(2, version=1), FinishReason.LENGTH)
    second = tree.add([1, 2], answer(3, version=2), STOP)
    assert second.parent == 0 and len(second.context) == 0
    assert tree.columns(second).versions.tolist() == [-1, 1, 2]


def test_turn_is_refused_where_ids_differ_from_the_reported_count():
    tree = EpisodeTree()
    with pytest.raises(ValueError, match="reported 3 sampled tokens but gave 2 ids"):
        tree.add([1], answer(2, 3), STOP, num_reported=3)
    assert tree.turns == ()


@pytest.mark.parametrize("prompt", [[], [[1, 2]], [1.5]], ids=["empty", "nested", "not whole numbers"])
def test_prompt_that_is_no_list_of_ids_is_refused(prompt):
    with pytest.raises(ValueError, match="one or more token ids"):
        EpisodeTree().add(prompt, answer(1), STOP)


def test_unknown_role_or_turn_is_refused_and_nothing_is_stored():
    tree = EpisodeTree()
    with pytest.raises(ValueError, match="expected one of main, summary"):
        tree.add([1], answer(2), STOP, role="boss")
    with pytest.raises(ValueError, match="earlier turns or -1"):
        tree.add([1], answer(2), STOP, continues=0)
    assert tree.turns == ()


TURN = Turn(index=0, parent=-1, context=TokenColumns.context([1]), sampled=answer(2, 3), finish_reason=STOP)
BROKEN = {
    "numbered from 1": ({"index": 1}, "expected turn 0"),
    "its own parent": ({"parent": 0}, "earlier turns"),
    "no prompt": ({"context": TokenColumns.empty()}, "nothing predicts"),
    "sampled in context": ({"context": answer(1)}, "in its context"),
    "supervised in context": ({"context": TokenColumns.supervised([1])}, "in its context"),
    "trainable but not sampled": ({"sampled": TokenColumns.supervised([1])}, "not sampled are marked trainable"),
    "logprob 0 / 0": ({"sampled": answer(2).replace(logprobs=np.float32([np.nan]))}, "finite and at most 0"),
    "no version": ({"sampled": answer(2).replace(versions=np.int32([-1]))}, "policy version"),
    "no temperature": ({"sampled": answer(2).replace(temperatures=np.float32([np.nan]))}, "temperature"),
    "kept set lacks it": ({"sampled": answer(2).replace(kept=KeptSets.from_rows([[3]]))}, "lacks the sampled id 2"),
    "kept ids cut": (
        {"sampled": answer(2).replace(kept=KeptSets(ids=np.int32([2]), offsets=np.int64([0, 2])))},
        "offsets do not cover",
    ),
    "context with a kept set": (
        {"sampled": TokenColumns.context([2]).replace(kept=KeptSets.from_rows([[2]]))},
        "have a logprob or a kept set",
    ),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_episode_that_no_engine_can_have_made_is_refused(change, message):
    check_episode(episode_of([TURN]))
    with pytest.raises(ValueError, match=rf"train-000000-000: .*{message}"):
        check_episode(episode_of([msgspec.structs.replace(TURN, **change)]))


def test_id_without_a_token_behind_it_is_refused():
    check_episode(episode_of([TURN]), vocab_size=4)
    padded = msgspec.structs.replace(TURN, sampled=answer(9, 11))
    with pytest.raises(ValueError, match="holds id 11, the vocabulary has ids 0 to 9"):
        check_episode(episode_of([padded]), vocab_size=10)


def test_long_episode_is_matched_in_its_tokens_not_token_by_token():
    """300 turns and 100,000 tokens: a loop over tokens in Python would need a hundred million steps here."""
    rng = np.random.default_rng(0)
    tree, history = EpisodeTree(), np.zeros(0, np.int32)
    for _ in range(300):
        prompt = np.concatenate([history, rng.integers(0, 50_000, 300).astype(np.int32)])
        sampled = answer(*rng.integers(0, 50_000, 33).tolist())
        tree.add(prompt, sampled, STOP)
        history = np.concatenate([prompt, sampled.ids])
    assert tree.path(tree.turns[-1]) == list(range(300)) and tree.num_forks == 0
    history[50_000] += 1
    assert tree.drift(history) == 50_000


class EpisodeTreeMachine(RuleBasedStateMachine):
    """Small alphabets make paths coincide, end inside each other and deviate anywhere."""

    turns = Bundle("turns")
    ids = st.lists(st.integers(0, 2), max_size=3)

    @initialize()
    def start(self):
        self.tree = EpisodeTree()
        self.seen: list[tuple[list[int], list[int]]] = []

    def call(self, prompt, sampled_ids):
        before = [p + s for p, s in self.seen]
        forks = self.tree.num_forks
        columns = answer(*sampled_ids, logprob=-0.01 * (len(self.seen) + 1), version=len(self.seen))
        drift = self.tree.drift(prompt)
        turn = self.tree.add(prompt, columns, STOP)
        self.seen.append((prompt, sampled_ids))
        longest = max((len(path) for path in before if prompt[: len(path)] == path), default=0)
        assert len(turn.context) == len(prompt) - longest
        assert self.tree.num_forks - forks == (drift is not None)
        if drift is not None:
            assert drift > longest
            assert any(
                path[:drift] == prompt[:drift] and path[drift] != prompt[drift] for path in before if len(path) > drift
            )
            assert turn.continues >= 0
        return turn

    @rule(target=turns, prompt=ids.filter(bool), sampled=ids)
    def call_anew(self, prompt, sampled):
        return self.call(prompt, sampled)

    @rule(target=turns, turn=turns, context=ids, sampled=ids)
    def call_on(self, turn, context, sampled):
        prompt, answered = self.seen[turn.index]
        return self.call(prompt + answered + context, sampled)

    @rule(target=turns, turn=turns, place=st.integers(0, 20), context=ids, sampled=ids)
    def call_with_rewritten_history(self, turn, place, context, sampled):
        prompt, answered = self.seen[turn.index]
        history = prompt + answered
        history[place % len(history)] = 7
        return self.call(history + context, sampled)

    @invariant()
    def joining_a_path_gives_what_was_added(self):
        for turn, (prompt, sampled) in zip(self.tree.turns, self.seen, strict=True):
            columns = self.tree.columns(turn)
            assert columns.ids.tolist() == prompt + sampled
            assert self.tree.prompt_ids(turn).tolist() == prompt
            assert columns.slice(len(prompt), len(columns)) == turn.sampled
            assert set(turn.sampled.versions.tolist()) <= {turn.index}

    @invariant()
    def stored_turns_build_the_same_tree(self):
        check_episode(episode_of(self.tree), vocab_size=8)
        again = EpisodeTree(self.tree.turns)
        assert [again.path(turn) for turn in again.turns] == [self.tree.path(turn) for turn in self.tree.turns]


TestEpisodeTree = EpisodeTreeMachine.TestCase
TestEpisodeTree.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
