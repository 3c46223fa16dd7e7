"""What is said of an engine that lost something."""

import asyncio

import pytest

from everlong.contracts.errors import EngineError, WorkerDied
from everlong.contracts.records import EngineStatus
from everlong.orchestrator import trouble


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(trouble, "LOOK_EVERY_S", 0.0)


async def said(*answers):
    """What is said while the engine answers this, one after the other, and its worker dies then."""
    left, lines = [*answers, WorkerDied("gone")], []

    async def status():
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return EngineStatus(policy_version=1, fingerprint="", trouble=answer)

    await trouble.tell(status, lines.append)
    return lines


async def test_every_trouble_is_said_once_and_its_end():
    assert await said("", "0 hangs", "0 hangs", "0 hangs; 1 hangs", "", "") == [
        "0 hangs",
        "0 hangs; 1 hangs",
        "what was lost of the engine is back",
    ]


async def test_an_engine_that_cannot_say_how_it_stands_is_asked_again():
    assert await said(EngineError("busy"), "0 hangs") == ["0 hangs"]


async def test_the_telling_ends_with_what_it_is_told_beside():
    class Mute:
        async def status(self):
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    async with trouble.trouble_told(Mute()):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
