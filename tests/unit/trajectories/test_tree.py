import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from everlong.contracts.records import FinishReason, Turn
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.trajectories.tree import EpisodeTree

STOP = FinishReason.STOP


def answer(*ids, logprob=-0.1, version=0):
    return TokenColumns.sampled_tokens(ids, [logprob] * len(ids), version=version)


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


@pytest.mark.parametrize(
    ("prompt", "position"),
    [([20, 21, 7, 30], 2), ([20, 21, 5, 6, 30], None), ([20], None), ([40, 41], None)],
    ids=["encoded again", "goes on", "ends inside", "shares nothing"],
)
def test_a_history_deviates_at_the_first_token_that_differs_from_what_was_sampled(prompt, position):
    tree = EpisodeTree()
    tree.add([20, 21], answer(5, 6), STOP)
    assert tree.departure(tree.add(prompt, answer(8), STOP)) == position


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
    assert (third.parent, third.continues, tree.departure(third)) == (0, 1, 4)
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
    assert (second.parent, second.continues, tree.departure(second)) == (-1, 0, 7)
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


def test_a_fork_is_seen_where_the_turn_before_it_was_sampled_twice():
    tree = EpisodeTree()
    tree.add([1], answer(2), STOP)
    left = tree.add([1, 2, 3], answer(4), STOP)
    tree.add([1], answer(2), STOP)
    fork = tree.add([1, 2, 3, 5], answer(6), STOP)
    assert (fork.parent, fork.continues, tree.departure(fork), tree.num_forks) == (2, left.index, 3, 1)


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
def test_stored_turns_that_no_engine_can_have_made_are_refused(change, message):
    EpisodeTree([TURN])
    with pytest.raises(ValueError, match=message):
        EpisodeTree([msgspec.structs.replace(TURN, **change)])


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
    assert tree.departure(tree.add(history, answer(1), STOP)) == 50_000


def common_length(left, right):
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


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
        turn = self.tree.add(prompt, columns, STOP)
        self.seen.append((prompt, sampled_ids))
        longest = max((len(path) for path in before if prompt[: len(path)] == path), default=0)
        assert len(turn.context) == len(prompt) - longest
        # a turn that begins where the longest match ends; one that begins earlier was left whole by a later turn
        starts = [len(p) - len(t.context) for (p, _), t in zip(self.seen[:-1], self.tree.turns, strict=False)]
        beside = [path for path, start in zip(before, starts, strict=True) if start == longest]
        furthest = max((common_length(path, prompt) for path in beside), default=0)
        deviates = longest < furthest < len(prompt)
        assert self.tree.num_forks - forks == deviates
        assert self.tree.departure(turn) == (furthest if deviates else None)
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
        again = EpisodeTree(self.tree.turns)
        assert [again.path(turn) for turn in again.turns] == [self.tree.path(turn) for turn in self.tree.turns]


TestEpisodeTree = EpisodeTreeMachine.TestCase
TestEpisodeTree.settings = settings(max_examples=40, stateful_step_count=12, deadline=None)
