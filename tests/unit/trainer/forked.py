"""Random groups of forked episodes for hypothesis, and the same as one row per branch."""

import numpy as np
from hypothesis import strategies as st

from everlong.contracts.errors import Reason
from everlong.contracts.records import (
    Episode,
    EpisodeOrder,
    EpisodeShare,
    FinishReason,
    MicroBatch,
    Purpose,
    ScoredGroup,
    Segment,
    TrainBatch,
    Turn,
    Verdict,
)
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.trajectories.admission import AdmissionConfig, admit_group
from everlong.trajectories.packing import PackingConfig, pack_batch
from everlong.trajectories.tree import EpisodeTree

ADMISSION = AdmissionConfig(zero_signal="keep", max_branches=50)
VOCAB = 11


def answer_of(rng, masked=0.0):
    """Some tokens with kept sets, temperatures and what the sampler thought of every kept id; some of them masked."""
    ids = rng.integers(0, VOCAB, rng.integers(1, 4))
    rows = [
        sorted({int(i), *rng.integers(0, VOCAB, rng.integers(1, 4)).tolist()}) if rng.random() < 0.6 else []
        for i in ids
    ]
    kept = KeptSets.from_rows(rows)
    kept = KeptSets(ids=kept.ids, offsets=kept.offsets, logprobs=-rng.random(len(kept.ids)).astype(np.float32) * 3)
    columns = TokenColumns.sampled_tokens(
        ids, -rng.random(len(ids)) * 4, version=0, temperature=float(rng.choice([0.7, 1.0, 1.3])), kept=kept
    )
    return columns.replace(trainable=rng.random(len(ids)) >= masked)


@st.composite
def groups(draw, masked=0.0):
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    made = []
    for group in range(draw(st.integers(1, 2))):
        prompt = rng.integers(0, VOCAB, 3)
        episodes, credits = [], []
        for attempt in range(draw(st.integers(1, 2))):
            turns = []
            for index in range(draw(st.integers(1, 5))):
                parent = draw(st.integers(-1, index - 1)) if index else -1
                own = rng.integers(0, VOCAB, rng.integers(0, 3))
                context = np.concatenate([prompt, own]) if parent < 0 else own
                turns.append(
                    Turn(
                        index=index,
                        parent=parent,
                        context=TokenColumns.context(context),
                        sampled=answer_of(rng, masked),
                        finish_reason=FinishReason.STOP,
                    )
                )
            order = EpisodeOrder(task="t", group=group, attempt=attempt, purpose=Purpose.TRAIN)
            episodes.append(Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=1.0), turns=tuple(turns)))
            credits.append(float(rng.choice([-1.1, 0.4, 0.8])))
        made.append(ScoredGroup(group=group, task="t", episodes=tuple(episodes), credits=tuple(credits)))
    return made


def packed(made, limit=10_000):
    return pack_batch(0, made, PackingConfig(micro_batch_tokens=limit), ADMISSION, seed=0).train_batch


def branches_of(made):
    """Per episode that trains: its group, and of each branch the columns and which of their tokens no earlier branch has."""
    for group in made:
        for admitted in admit_group(group, ADMISSION, 0):
            if not admitted.branches:
                continue
            tree, seen, rows = EpisodeTree(admitted.episode.turns), set(), []
            for branch in admitted.branches:
                own = []
                for index in branch.path:
                    turn = admitted.episode.turns[index]
                    own += [False] * len(turn.context) + [index not in seen] * len(turn.sampled)
                seen.update(branch.path)
                columns = tree.columns(admitted.episode.turns[branch.path[-1]]).with_credit(admitted.credit)
                rows.append((columns, np.array(own) & columns.trainable))
            yield group.group, rows


def flattened(made):
    """Every branch as a row of its own, all of whose sampled tokens train."""
    micro_batches, shares = [], []
    for number, (group, rows) in enumerate(branches_of(made)):
        for branch, (columns, _) in enumerate(rows):
            segment = Segment(parent=-1, start=0, length=len(columns), episode=number, branch=branch)
            micro_batches.append(MicroBatch(columns=columns, segments=(segment,)))
        count = sum(columns.num_trainable for columns, _ in rows)
        shares.append(EpisodeShare(episode=f"e{number}", group=group, num_trainable=count))
    return TrainBatch(batch=0, micro_batches=tuple(micro_batches), episodes=tuple(shares))
