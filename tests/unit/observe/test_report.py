"""The report is one file that needs nothing else."""

import re
from html.parser import HTMLParser
from pathlib import Path

from everlong.observe import (
    EpisodeText,
    JsonlSink,
    LossRow,
    MemorySink,
    TurnText,
    read_evaluations,
    read_points,
    read_timings,
    write_report,
)

BALANCE = {"episodes": {"offered": 1200, "trained: trained": 1100}, "tokens": {"sampled": 54321}}
EPISODE = EpisodeText(
    title="train-000004-002, count <lines>",
    outcome="done, reward 1",
    turns=(TurnText(role="user", text="Count & report"), TurnText(role="assistant", text="<script>alert(1)</script>")),
)


class Page(HTMLParser):
    """Tags with their attributes, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def run_folder(tmp_path: Path) -> Path:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log("batch", 0, {"loss": 4.0, "seconds/training": 30.0, "seconds/forward": 10.0, "phase/warmup": 1.0})
    for batch in (1, 2):
        values = {"reward": batch / 2, "seconds/sampling": 45.0, "seconds/training": 21.0, "seconds/forward": 4.0}
        sink.log("batch", batch, values)
    sink.log("eval", 0, {"success": 0.125, "episodes": 40.0, "seconds/sampling": 8.0})
    sink.log("eval", 2, {"success": 0.75, "episodes": 40.0, "seconds/sampling": 7.0})
    sink.close()
    (tmp_path / "config.toml").write_text('seed = 7\nname = "<b>"\n')
    return tmp_path


SUMMARY = {"model": "a <small> one"}


def test_report_holds_every_part_and_escapes_what_agents_wrote(tmp_path: Path) -> None:
    """Draws with matplotlib, which takes most of a second to import."""
    losses = [LossRow(length="7 to 19 tokens", episodes=20, lost=3)]
    report = write_report(run_folder(tmp_path), summary=SUMMARY, balance=BALANCE, losses=losses, episodes=(EPISODE,))
    page = Page(report.read_text())
    images = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 2 and all(image.startswith("data:image/png;base64,iVBOR") for image in images)
    for part in (
        "12.5 %",
        "75.0 %",
        "1,200",
        "54,321",
        "seed = 7",
        'name = "<b>"',
        "a <small> one",
        "7 to 19 tokens",
        "3 (15.0 %)",
    ):
        assert part in page.text, part
    assert "95 % interval 59.8 to 85.8, 40 episodes" in page.text, "of 30 successes in 40 trials"
    assert "count <lines>" in page.text and "<script>alert(1)</script>" in page.text
    assert not any(tag in ("script", "b", "lines", "small") for tag, _ in page.tags)


def test_report_asks_nobody_for_anything_and_fits_a_phone(tmp_path: Path) -> None:
    html = write_report(run_folder(tmp_path), summary=SUMMARY, balance=BALANCE, episodes=(EPISODE,)).read_text()
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", html)
    assert not any(tag == "link" for tag, _ in page.tags)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_what_a_reader_must_know_first_stands_first(tmp_path: Path) -> None:
    page = Page(
        write_report(tmp_path, summary=SUMMARY, balance={}, warning=["not one token", "give <more> time"]).read_text()
    )
    assert page.text.index("not one token") < page.text.index("give <more> time") < page.text.index("What was trained")
    assert ("p", {"class": "warning"}) in page.tags


def test_report_of_a_run_that_has_nothing_yet_says_so(tmp_path: Path) -> None:
    text = Page(write_report(tmp_path, summary={}, balance={}).read_text()).text
    for sentence in ("Nothing was measured yet.", "No evaluation was done yet.", "No timing was measured yet."):
        assert sentence in text


def test_timings_add_up_by_phase_and_count_what_the_trainer_times_once(tmp_path: Path) -> None:
    assert read_timings(read_points(run_folder(tmp_path) / "metrics.jsonl")) == [
        ["", "warm-up", "RL", "evaluation", "together"],
        ["sampling", "–", "1 min 30 s", "15 s", "1 min 45 s"],
        ["training", "30 s", "42 s", "–", "1 min 12 s"],
        ["– of it forward", "10 s", "8.0 s", "–", "18 s"],
        ["together", "30 s", "2 min 12 s", "15 s", "2 min 57 s"],
    ]


def test_evaluation_without_episodes_is_none(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.log("eval", 0, {"success": 0.0, "episodes": 0.0})
    sink.log("eval", 4, {"success": 0.25, "episodes": 8.0})
    sink.log("eval", 4, {"success": 0.5, "episodes": 8.0})
    assert [(one.num_batches, one.success) for one in read_evaluations(sink.points)] == [(4, 0.5)]
