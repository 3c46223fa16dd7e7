"""What takes long and shows no batch is said before it begins, once."""

import io

from rich.console import Console

from everlong.cli.announced import Announced
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.observe import Stages
from everlong.orchestrator import events


class Recorder:
    def __init__(self) -> None:
        self.begun: list[events.Action] = []

    def begin(self, action: events.Action) -> None:
        self.begun.append(action)

    async def next_event(self, wake_at_s: float | None) -> events.Event:
        return events.Tick(wake_at_s or 0.0)

    async def close(self) -> None:
        self.begun.clear()


def episode(purpose: Purpose, attempt: int) -> events.RunEpisode:
    return events.RunEpisode(EpisodeOrder(task="t", group=0, attempt=attempt, purpose=purpose))


async def test_the_first_publication_and_every_evaluation_are_said_once_and_everything_is_done() -> None:
    text, recorder = io.StringIO(), Recorder()
    conductor = Announced(recorder, Stages(Console(file=text)))
    recorded = events.RecordEval(index=0, policy_version=0, groups=(0,))
    actions = [
        events.Publish(),
        episode(Purpose.EVAL, 0),
        episode(Purpose.EVAL, 1),
        recorded,
        episode(Purpose.TRAIN, 0),
        events.Publish(),
        episode(Purpose.EVAL, 2),
    ]
    for action in actions:
        conductor.begin(action)
    assert recorder.begun == actions
    assert text.getvalue().splitlines() == [
        "publishing the weights, for the first time whole",
        "evaluating the held-out tasks",
        "evaluating the held-out tasks",
    ]
    assert await conductor.next_event(3.0) == events.Tick(3.0)
    await conductor.close()
    assert recorder.begun == []
