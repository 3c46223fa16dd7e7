"""The report is one file that needs nothing else."""

import re
from html.parser import HTMLParser
from pathlib import Path

from everlong.observe import EpisodeText, JsonlSink, TurnText, write_report

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
    for batch in range(3):
        values = {"reward": batch / 2, "seconds/sample": 40.0, "seconds/train": 21.0}
        sink.log("batch", batch, values)
    sink.log("eval", 0, {"accuracy": 0.125})
    sink.log("eval", 1, {"accuracy": 0.75, "episodes": 40.0})
    sink.close()
    (tmp_path / "config.toml").write_text('seed = 7\nname = "<b>"\n')
    return tmp_path


def test_report_holds_every_part_and_escapes_what_agents_wrote(tmp_path: Path) -> None:
    report = write_report(run_folder(tmp_path), balance=BALANCE, episodes=(EPISODE,))
    html = report.read_text()
    page = Page(html)
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 1 and (images[0] or "").startswith("data:image/png;base64,iVBOR")
    for part in ("0.125", "0.75", "1,200", "54,321", "2 min 00 s", "1 min 03 s", "seed = 7", 'name = "<b>"'):
        assert part in page.text, part
    assert "count <lines>" in page.text and "<script>alert(1)</script>" in page.text
    assert not any(tag in ("script", "b", "lines") for tag, _ in page.tags)


def test_report_asks_nobody_for_anything_and_fits_a_phone(tmp_path: Path) -> None:
    html = write_report(run_folder(tmp_path), balance=BALANCE, episodes=(EPISODE,)).read_text()
    page = Page(html)
    assert not re.search(r"https?://|@import|url\(", html)
    assert not any(tag == "link" for tag, _ in page.tags)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags


def test_report_of_a_run_that_has_nothing_yet_says_so(tmp_path: Path) -> None:
    text = Page(write_report(tmp_path, balance={}).read_text()).text
    for sentence in ("No reward was measured yet.", "No evaluation was done yet.", "No timing was measured yet."):
        assert sentence in text
