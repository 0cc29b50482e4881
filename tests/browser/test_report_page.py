"""Each view of the page in a real browser, its numbers held against the run's files."""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun

from llamarl.cli.main import main
from llamarl.observability.metrics import read_metrics
from llamarl.observability.rollouts import Rollout, read_rollouts
from llamarl.report.server import WatchedRuns, make_server
from llamarl.types import Failure, Score, Turn

EVIL = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"
pytest_plugins = ["in_chromium"]
pytestmark = pytest.mark.timeout(120)
browser = pytest.mark.browser
"""Not in the suite's slice: ``make test-browser`` runs all."""
VIEWS = (
    *("summary/0", "curves/0", "timeline/0", "staleness/0", "rollouts/0", "failures/0", "garbage/0", "prompts/0"),
    *("ledger/0", "config/0", "tick/0/2", "group/0/2/20", "response/0/2/20/1"),
)


def _outcome(tick: int, group: int, sample: int) -> float | Failure:
    if tick == 3 and sample == 0:
        return Failure(kind="exception", detail=f"KeyError: 'x' {EVIL}")
    return float((tick + sample) % 2)


RUN = MadeRun(
    ticks=7,
    groups=3,
    outcome=_outcome,
    text=lambda t, g, s: (
        EVIL if (t, g, s) == (2, 0, 1) else ("and so on " * 40 if s == 3 and t > 4 else f"answer {s} of {t}")
    ),
    prompt=lambda t, g: "the one that comes again" if g == 0 and t in (1, 4) else f"question {t}.{g}",
    finish=lambda t, g, s: "length" if s == 3 and t > 4 else "stop",
    overhead_s=0.5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RUN.write(tmp_path_factory.mktemp("made") / "first")
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture
def page(run: Path, open_page: Callable[..., Any]) -> Any:
    opened = open_page(run / "report.html")
    yield opened
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("file:")] == []
    assert opened.page.evaluate("window.hit") is None


@pytest.fixture(scope="module")
def rollouts(run: Path) -> list[Rollout]:
    return list(read_rollouts(run))


def test_summary_begins_with_what_is_wrong_and_counts_what_is_there(page: Any, rollouts: list[Rollout]) -> None:
    page.open("summary/0")
    assert page.page.locator(".finding h3").all_inner_texts() == ["Some rewards fail", "The trainer waits"]
    assert f"3 of {len(rollouts)} responses" in page.text(".finding")
    assert f"{len(rollouts)}, all of them with text" in page.text()


def test_the_summary_shows_accuracy_as_it_was_measured_a_sample_and_the_setup(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    measured = {0: 0.3125, 20: 0.5, 40: 0.875, 59: 0.125}
    run = MadeRun(ticks=60, accuracy=measured.get, groups=1).write(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    page = open_page(run / "report.html").open("summary/0")
    assert page.tile("held-out accuracy") == "0.313 → 0.125"
    assert page.page.locator(".finding h3").first.inner_text() == "Accuracy fell from 0.875 to 0.125."
    (curve,) = page.chart("Held-out accuracy")
    assert (curve["x"], curve["y"]) == ([0, 20, 40, 59], [0.3125, 0.5, 0.875, 0.125])  # by the version evaluated
    rewards, trend = page.chart("Mean reward")  # of 60 ticks, each of which has the same mean
    assert rewards["y"] == [0.5] * 60 and trend["y"] == pytest.approx([0.5] * 60)
    written = page.page.locator("section.panel", has=page.page.get_by_role("heading", name="wrote in tick 59"))
    assert written.locator(".value").all_inner_texts() == ["1", "0"]  # the best and the worst
    assert "answer 0 of tick 59" in written.inner_text() and "question 590" in written.inner_text()
    assert "learning rate 0.0002, constant" in page.text() and "7 million parameters" in page.text()


@browser
def test_curves_hold_the_rows_over_versions_tokens_and_seconds(page: Any, run: Path) -> None:
    rows = read_metrics(run)
    page.open("curves/0")
    drawn = page.chart("Mean reward")[0]
    assert drawn["y"] == [row["reward/mean"] for row in rows] and drawn["x"] == [row["policy_version"] for row in rows]
    page.page.get_by_role("button", name="Seconds").click()
    page.page.wait_for_timeout(200)
    # the trainer ends tick k at 8 + 5 k seconds
    assert page.chart("Mean reward")[0]["x"] == pytest.approx([8.0 + 5 * tick for tick in range(7)])
    page.page.get_by_role("button", name="Tokens trained").click()
    page.page.wait_for_timeout(200)
    assert page.chart("Mean reward")[0]["x"][-1] == sum(row["tokens/trained"] or 0 for row in rows)
    assert page.chart("Entropy")[0]["y"] == [0.5] * 7


def test_an_idle_gap_leads_to_its_tick_a_group_a_response_and_a_token(page: Any, rollouts: list[Rollout]) -> None:
    page.open("timeline/0")
    chart = page.page.locator(".chart.tall")
    chart.locator("xpath=self::*[@data-drawn]").wait_for()
    # the trainer works from 5.5 to 8 and from 10.5 to 13 s: it is idle from 8 to 10.5, before tick 1
    at = chart.evaluate(
        """node => { const {xaxis, yaxis} = node._fullLayout, box = node.getBoundingClientRect();
        return [box.left + xaxis._offset + xaxis.d2p(9.2), box.top + yaxis._offset + yaxis.d2p(2)]; }"""
    )
    page.page.mouse.move(*at)
    page.page.mouse.click(*at)
    page.page.wait_for_selector("#gap-panel")
    assert "trainer stood idle for 2.5 s before tick 1" in page.text("#gap-panel")
    assert "for tick 1 of reward" in page.text("#gap-panel") and "remaining 500 ms" in page.text("#gap-panel")
    page.page.get_by_role("link", name="Open tick 1", exact=True).click()
    page.page.wait_for_selector('[data-view="tick"][data-ready="1"]')
    assert page.rows("What each executor did")[2][:3] == ["trainer", "2.5 s", "2.5 s"]
    page.page.get_by_role("link", name="10", exact=True).click()
    page.page.wait_for_selector('[data-view="group"][data-ready="1"]')
    page.page.get_by_role("link", name="Response 2").click()
    page.page.wait_for_selector('[data-view="response"][data-ready="1"]')
    page.page.locator(".tokens").focus()
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowRight")
    sample = next(r for r in rollouts if (r.tick, r.response.prompt_index, r.response.sample_index) == (1, 10, 2))
    assert f"{sample.response.behavior_logprobs[1]:.3f} nats" in page.text("#token")
    assert f"{sample.response.policy_versions[1]}, staleness {1 - sample.response.policy_versions[1]}" in page.text(
        "#token"
    )


@browser
def test_the_timeline_says_who_sets_the_pace(page: Any) -> None:
    page.open("timeline/0")
    assert page.rows("Who sets the pace") == [
        ["generator", "4 s", "18 %"],  # 6 gaps of 1 s in 34 s
        ["reward", "1 s", "80 %"],
        ["trainer", "2.5 s", "54 %"],
    ]
    assert "generator is idle least (18 %). A tick takes 5 s (median)." in page.text()


@browser
def test_staleness_counts_every_trained_token(page: Any, rollouts: list[Rollout]) -> None:
    page.open("staleness/0")
    counts = Counter(
        r.tick - int(version)
        for r in rollouts
        if isinstance(r.response.outcome, Score)
        for version in r.response.policy_versions
    )
    assert page.chart("Tokens by staleness")[0]["x"] == sorted(counts)
    assert page.chart("Tokens by staleness")[0]["y"] == [count for _, count in sorted(counts.items())]


@browser
def test_rollouts_are_filtered_by_tick_outcome_reward_and_text(page: Any, rollouts: list[Rollout]) -> None:
    page.open("rollouts/0")
    found = page.page.locator("#found")

    def expect(number: int) -> None:
        page.page.locator("#found", has_text=re.compile(rf"^{number} response")).wait_for()

    expect(len(rollouts))
    page.page.get_by_label("Outcome").select_option("failed")
    expect(sum(isinstance(r.response.outcome, Failure) for r in rollouts))
    page.page.get_by_label("Outcome").select_option("repetition")
    expect(sum(r.response.text.startswith("and so on") for r in rollouts))
    page.page.get_by_label("Outcome").select_option("")
    page.page.get_by_label("From tick").fill("5")
    page.page.get_by_label("Reward from").fill("1")
    page.page.keyboard.press("Tab")
    expect(sum(r.tick >= 5 and getattr(r.response.outcome, "value", 0) >= 1 for r in rollouts))
    page.page.get_by_role("button", name="Clear").click()
    page.page.get_by_label("Text in prompt or response").fill("answer 2 of 6")
    page.page.keyboard.press("Enter")
    expect(3)
    assert found.inner_text() == "3 responses hold “answer 2 of 6”, among those whose text is on this page."


@browser
def test_a_row_of_the_responses_shows_prompt_and_expected_answer_and_opens_where_it_is_blank(page: Any) -> None:
    page.open("rollouts/0")
    row = page.page.locator("#view tbody tr, tbody tr").first
    assert "question 0.0" in row.inner_text() or "the one" in row.inner_text()
    assert "42" in row.locator("td").all_inner_texts()
    row.locator("td").last.click()
    page.page.wait_for_selector('[data-view="response"][data-ready="1"]')


@browser
def test_a_group_shows_rewards_advantages_and_the_expected_answer(page: Any) -> None:
    page.open("group/0/3/31")
    assert page.page.locator(".sample .value, .sample header .tag").all_inner_texts() == ["failed", "0", "1", "0"]
    shown = [text for text in page.page.locator(".sample small").all_inner_texts() if text.startswith("advantage")]
    assert (
        shown == ["advantage +0.75"] * 3 and "Advantages as they were trained" in page.text()
    )  # the failed one has none
    assert "Expected answer 42" in page.text()


def test_markup_in_a_response_is_text(page: Any) -> None:
    page.open("group/0/2/20")
    assert EVIL in page.page.locator(".sample pre").nth(1).inner_text()
    page.open("response/0/2/20/1")
    page.open("failures/0")
    assert EVIL in page.page.locator(".sample .tag").first.inner_text()


@browser
def test_tokens_are_coloured_by_gap_ratio_version_and_mask(page: Any) -> None:
    page.open("response/0/4/40/2")
    tokens = page.page.locator(".tokens span")
    shades = {}
    for by in ("Log-prob", "Gap", "Ratio, clipped", "Version", "Mask", "Nothing"):
        page.page.get_by_role("button", name=by, exact=True).click()
        shades[by] = tokens.evaluate_all("nodes => nodes.map(node => node.style.background)")
    assert len(set(shades["Log-prob"])) == 5 and set(shades["Nothing"]) == {""}  # each a quarter of a nat less likely
    assert len(set(shades["Gap"])) <= 2  # a tenth of a nat, rounded
    assert len(set(shades["Version"])) == 2 and shades["Version"][1] == shades["Version"][4]
    assert tokens.evaluate_all("nodes => nodes.map(node => node.className)") == ["", "", "", "", "clipped"]
    tokens.nth(4).click()
    # behaviour -5/4, the trainer a tenth more: exp(0.1) = 1.105
    facts = page.text("#token")
    assert "-1.250 nats" in facts and "+0.100 nats: trainer -1.150" in facts and "Ratio 1.11, clipped" in facts
    assert "3, staleness 1" in facts and "trained" in facts


@browser
def test_failures_are_counted_by_cause_with_the_answer_expected(page: Any) -> None:
    page.open("failures/0")
    (row,) = page.rows("By cause")
    assert row[0].startswith("exception: KeyError: 'x'") and row[1:] == ["3", "3.6 %", "3 … 3"]
    assert page.page.locator(".sample").count() == 3 and page.text().count("Expected answer: 42") == 3


def test_the_ledger_adds_up_to_what_was_generated(page: Any, run: Path) -> None:
    page.open("ledger/0")
    rows = {row[0]: row[1] for row in page.rows("Over the whole run")}
    generated = sum(row["tokens/generated"] or 0 for row in read_metrics(run))
    failed = sum(row["tokens/failed"] or 0 for row in read_metrics(run))
    assert rows["Generated"] == str(generated) and rows["No reward"] == str(failed) == "9"
    assert rows["Trained, each counted once"] == str(generated - failed)
    assert page.tile("generated = where they went") == "closes"


@browser
def test_garbage_is_counted_by_sign(page: Any, rollouts: list[Rollout]) -> None:
    page.open("garbage/0")
    cut = sum(r.response.finish_reason == "length" for r in rollouts)
    assert page.tile("cut by length") == page.tile("runs in circles") == f"{100 * cut / len(rollouts):.1f} %"
    assert page.tile("different rewards") == "2" and page.tile("empty") == "0 %"


@browser
def test_a_prompt_that_comes_again_is_shown_over_versions(page: Any) -> None:
    page.open("prompts/0")
    assert "the one that comes again" in page.text()
    assert page.chart("Reward over versions")[0]["x"] == [1, 4]
    assert page.page.locator(".sample h3").all_inner_texts() == ["tick 1", "tick 4"]


@browser
def test_configuration_shows_every_key(page: Any) -> None:
    page.open("config/0")
    page.page.get_by_label("Find a key").fill("rho")
    page.page.locator("main [role=status]", has_text=re.compile("^1 of")).wait_for()
    assert "algorithm.rho 4" in page.text()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory, run: Path) -> Path:
    """A page of three runs whose names, texts and settings are long, in one word too."""
    folder = tmp_path_factory.mktemp("crowd")
    long, word = "a sentence that goes on and on " * 8, "word" * 60
    turn = Turn(start=0, end=3, finish_reason="stop", reply=word, reward=0.123456789, observation=long)
    MadeRun(
        ticks=4,
        outcome=lambda t, g, s: Failure(kind="exception", detail=word) if s == 0 else 12345.6789 * (t + s),
        text=lambda t, g, s: (long, word)[s % 2],
        prompt=lambda t, g: (long, word)[g % 2],
        answer=word,
        turns=lambda t, g, s: (turn,),
        settings={"optimizer.lr": "0.000123456789", "data.system_prompt": f"'{word}'", "run.seed": "123456789"},
    ).write(folder / ("a_name_in_one_word" * 5))
    MadeRun(ticks=3).write(folder / "a name of many short words, as nobody gives it to a run that is begun in a hurry")
    MadeRun(ticks=50).write(folder / "plain")
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


@browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 768, 390])
def test_no_text_of_any_view_is_cut_off(
    run: Path, crowd: Path, open_page: Callable[..., Any], width: int, theme: str
) -> None:
    for file, views in ((run / "report.html", VIEWS), (crowd, ("runs/0", *VIEWS, "group/0/2/21", "response/0/2/21/0"))):
        page = open_page(file, width=width, theme=theme)
        for view in views:
            page.open(view)
            assert page.cut_text() == [], view
            assert page.page.evaluate("document.documentElement.dataset.theme") == theme
        assert page.errors == []


@browser
@pytest.mark.parametrize(
    "style",
    [
        ".tile b { white-space: nowrap; overflow: hidden; width: 30px }",
        "main { position: relative; left: 60% }",
        ".chart svg { overflow: visible; margin-left: -40px }",
    ],
)
def test_text_that_is_cut_off_is_found(page: Any, style: str) -> None:
    page.open("summary/0")
    assert page.cut_text() == []
    page.page.add_style_tag(content=style)
    assert page.cut_text()


@browser
def test_the_page_is_worked_by_keyboard_alone(page: Any) -> None:
    page.open("summary/0")
    page.page.keyboard.press("Tab")  # the link that skips to the content
    assert page.page.evaluate("document.activeElement.innerText") == "Skip to the content"
    seen = set()
    for _ in range(40):
        page.page.keyboard.press("Tab")
        seen.add(page.page.evaluate("document.activeElement.innerText"))
    assert {"Timeline", "Rollouts", "Configuration"} <= seen
    page.open("timeline/0")
    page.page.locator("#gaps button").first.focus()
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("#gap-panel")


@browser
def test_runs_side_by_side_show_what_differs(tmp_path: Path, run: Path, open_page: Callable[..., Any]) -> None:
    other = MadeRun(ticks=4, settings={"optimizer.lr": "0.5"}).write(tmp_path / "second")
    assert main(["report", str(run), str(other), "--out", str(tmp_path / "both.html")]) == 0
    page = open_page(tmp_path / "both.html").open("config/0")
    differ = {"optimizer.lr": ("0.0002", "0.5"), "run.num_ticks": ("7", "4")}
    rows = page.rows("Settings side by side")
    assert {row[0]: row[1].split() for row in rows} == {k: ["first", a, "second", b] for k, (a, b) in differ.items()}
    page.open("curves/1")
    assert {trace["name"] for trace in page.chart("Mean reward")} >= {"first", "second"}
    page.open("runs/0")
    panel = page.page.locator("table tbody tr")
    assert [row.split("\t")[0].strip() for row in panel.all_inner_texts()] == ["first", "second"]
    assert panel.last.locator("td[data-title='optimizer.lr']").inner_text() == "0.5"
    assert panel.last.locator("td[data-title='state']").inner_text() == "Done, 4 ticks"
    assert len(page.chart("Mean reward")) == 2
    page.page.get_by_role("link", name="second").click()
    page.page.wait_for_selector('[data-view="summary"][data-run="1"][data-ready="1"]')
    page.open("tick/1/3")
    assert "Tick 3" in page.text() and page.errors == []


@browser
def test_a_run_without_anything_still_has_a_page(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    folder = tmp_path / "begun"
    folder.mkdir()
    (folder / "config.toml").write_text("[run]\nnum_ticks = 3\n")
    assert main(["report", str(folder)]) == 0
    page = open_page(folder / "report.html")
    for view in VIEWS:
        page.open(view)
    assert page.errors == [] and "could not be drawn" not in page.text()
    assert json.dumps(page.open("summary/0").text()).count("Missing") == 4


@browser
def test_a_run_that_imitates_shows_its_losses_and_nothing_of_samples(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    losses, held = [1.5, 1.25, 0.75], {0: 1.375, 2: 0.875}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps(
                {"step": tick, "policy_version": tick + 1, "time/step_s": 2.0, "loss/policy": loss}
                | ({"eval/loss": held[tick], "eval/policy_version": tick} if tick in held else {})
            )
            + "\n"
            for tick, loss in enumerate(losses)
        )
    )
    assert main(["report", str(tmp_path)]) == 0
    page = open_page(tmp_path / "report.html").open("summary/0")
    assert page.page.locator(".tile b").all_inner_texts() == ["1.38 → 0.875", "6\u202fs"]
    assert [page.chart(name)[0]["y"] for name in ("Held-out loss", "Training loss")] == [[1.375, 0.875], losses]
    page.open("curves/0")
    assert page.page.locator("section.panel h3").all_inner_texts() == ["Held-out loss", "Training loss"]
    page.open("tick/0/2")
    told = ["training loss", "entropy, nats a token", "this tick took"]
    assert page.page.locator(".tile span").all_inner_texts() == told
    assert "No responses" not in page.text()
    assert page.errors == []


@browser
def test_a_watched_run_is_seen_growing_and_its_end_too(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    folder = MadeRun(ticks=2, settings={"run.num_ticks": "3"}).write(tmp_path / "grows")
    longer = MadeRun(ticks=3).write(tmp_path / "longer")
    server = make_server(WatchedRuns([folder], 5_000_000), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        page = open_page(server.url).open("summary/0")
        assert "Stopped after 2 of 3 ticks" in page.text()
        for name in ("metrics.jsonl", "trace.json", "rollouts/tick_000002.jsonl"):
            (folder / name).write_bytes((longer / name).read_bytes())
        page.page.locator("main", has_text="Done, 3 ticks").wait_for()
        assert page.chart("Mean reward")[0]["x"] == [1, 2, 3]  # policy versions
        assert {url.split("/")[2] for url in page.requests} == {f"127.0.0.1:{server.server_port}"}
        assert page.errors == []
        rows = (folder / "metrics.jsonl").read_bytes()
        (folder / "metrics.jsonl").unlink()
        (folder / "metrics.jsonl").mkdir()
        page.page.locator("#live", has_text="metrics.jsonl is a folder").wait_for()  # and what was seen stays
        assert page.chart("Mean reward")[0]["x"] == [1, 2, 3]
        (folder / "metrics.jsonl").rmdir()
        (folder / "metrics.jsonl").write_bytes(rows)
        page.page.locator("#live", has_text="run has ended").wait_for()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
    page.page.locator("#live", has_text="has ended; this is how it stood").wait_for()
    page.open("ledger/0")  # what was fetched stays
    assert page.tile("generated = where they went") == "closes"


def test_an_episode_shows_who_said_what_and_what_each_turn_was_worth(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    """Tokens 0 and 1 are the first turn, 2 and 3 the environment's, 4 the second turn; what came last nobody was shown."""
    turns = (
        Turn(
            start=0, end=2, finish_reason="stop", reply=EVIL, reward=0.25, parts={"moves": 1.0}, observation="and now?"
        ),
        Turn(start=4, end=5, finish_reason="length", reply="7", reward=0.5, observation=f"You won. {EVIL}"),
    )
    run = MadeRun(ticks=1, length=lambda t, g, s: 5, turns=lambda t, g, s: turns).write(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    page = open_page(run / "report.html").open("response/0/0/0/1")
    titles = page.page.locator(".turn > h3").all_inner_texts()
    assert titles[:4] == [
        "Prompt",
        "Model, turn 1: reward 0.25, stop",
        "Environment or tool",
        "Model, turn 2: reward 0.5, length",
    ]
    assert titles[4].startswith("Environment, at the end") and "You won." in page.text(".turn:last-of-type")
    closed = page.page.locator("#turns")
    assert closed.get_attribute("open") is None and not closed.locator("table").is_visible()
    assert page.text("#turns summary") == "2 turns, rewards 0.25, 0.5"
    closed.locator("summary").click()
    rows = closed.locator("tbody tr").all_inner_texts()
    assert len(rows) == 2 and EVIL in rows[0] and "and now?" in rows[0] and "moves 1" in rows[0]
    assert page.errors == [] and page.page.evaluate("window.hit") is None


@browser
def test_the_timeline_of_a_fork_opens_on_the_ticks_that_it_has(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = MadeRun(ticks=14).write(tmp_path / "fork")
    events = json.loads((run / "trace.json").read_text())
    own = [json.dumps(event) for event in events if event.get("args", {}).get("tick", 12) >= 12]
    (run / "trace.json").write_text("[\n" + ",\n".join(own) + "\n]\n")
    assert main(["report", str(run)]) == 0
    page = open_page(run / "report.html").open("timeline/0")
    assert page.text("output") == "ticks 13 to 13 of 14"
    page.page.get_by_role("button", name="← earlier").click()
    assert page.text("output") == "ticks 12 to 13 of 14"
    assert page.errors == []


@browser
def test_the_ledger_closes_where_rows_to_imitate_stand_beside_what_is_sampled(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    row = {"step": 0, "tokens/generated": 60, "tokens/imitated": 20, "tokens/failed": 8, "tokens/unused": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**row, "tokens/carried": 12, "tokens/trained": 60}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    page = open_page(tmp_path / "report.html").open("ledger/0")
    assert page.tile("generated and imitated = where they went") == "closes"
    assert page.tile("of them trained") == "75 %"  # 60 of 80
    assert page.rows("Over the whole run")[-1][:3] == ["Generated, and rows to imitate", "80", "100 %"]
    assert page.errors == []


@browser
def test_prompts_under_one_long_system_prompt_are_not_the_same_prompt(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    system = "You are a careful assistant. " * 10
    run = MadeRun(ticks=3, prompt=lambda t, g: system + ("again" if t != 1 and g == 0 else f"{t}.{g}"))
    assert main(["report", str(run.write(tmp_path / "run"))]) == 0
    page = open_page(tmp_path / "run" / "report.html").open("prompts/0")
    assert page.chart("Reward over versions")[0]["x"] == [0, 2]
    assert page.page.get_by_label("Prompt").locator("option").count() == 1
    assert page.page.locator("section.panel pre").first.inner_text() == system[:200] + " …"
    assert page.errors == []


@browser
def test_no_token_of_a_response_without_a_reward_is_said_to_train(page: Any) -> None:
    page.open("response/0/3/30/0")
    assert "Tokens 3, 0 of them trained" in page.text() and "so it was not trained" in page.text()
    page.page.locator(".tokens [data-token]").first.click()
    assert "Mask not trained" in page.text("#token")


@browser
def test_failures_of_environments_are_told_apart_by_exception(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    causes = ["KeyError: 'x'", "ValueError: no move", "ValueError: no turn", "ValueError: no end"]
    outcome = lambda t, g, s: Failure(kind="environment", detail=causes[s])  # noqa: E731
    assert main(["report", str(MadeRun(ticks=1, groups=1, outcome=outcome).write(tmp_path / "run"))]) == 0
    page = open_page(tmp_path / "run" / "report.html").open("failures/0")
    told = [(row[0], row[1]) for row in page.rows("By cause")]
    assert told == [("environment: ValueError: no move", "3"), ("environment: KeyError: 'x'", "1")]


@browser
def test_one_tick_is_no_plural_and_a_task_chosen_in_another_run_hides_nothing(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    for name in ("one", "other"):
        run = MadeRun(ticks=1).write(tmp_path / name)
        path = run / "rollouts" / "tick_000000.jsonl"
        lines = path.read_text().splitlines()
        tasks = [f"{name} {i % 2}" if name == "one" else name for i in range(len(lines))]
        records = [json.loads(line) | {"task": task} for line, task in zip(lines, tasks, strict=True)]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["report", str(tmp_path)]) == 0
    page = open_page(tmp_path / "report.html").open("summary/0")
    assert "Done, 1 tick." in page.text()
    page.open("rollouts/0").page.get_by_label("Task").select_option("one 1")
    page.page.locator("#found", has_text="4 responses match").wait_for()
    page.open("rollouts/1").page.locator('[data-run="1"] #found', has_text="8 responses match").wait_for()
