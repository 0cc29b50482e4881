"""How large the page of a long run is, and how fast it opens: ``python benchmarks/report_page.py --json OUT``.

1. Make the folder of a run of 1,000 ticks × 256 responses of 64 tokens, with four executors in its trace.
2. Time ``llamarl report`` on it.
3. Open the page in Chromium (extra ``browser``) in fresh contexts: from the navigation until the words of the summary, of the timeline
   and of the list of all responses are there, and until their first chart is drawn.

The bar: data of at most 5 MB beside the charting script; words and chart of the summary within 3 s. Measure on an idle machine: the
charting script alone takes a second of a core to compile.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import claim, spread, write_report

EXECUTORS = {"generator": (0.0, 0.8), "reward": (0.8, 0.9), "trainer": (0.9, 1.7), "evaluator": (1.7, 1.71)}
"""Seconds of a tick's start and end; the next begins a second later."""
WORDS = (
    "add the two sides then divide by seven so that what is left over equals nine and the answer must be even".split()
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the report here")
    parser.add_argument("--ticks", type=int, default=1000)
    parser.add_argument("--responses", type=int, default=256, help="of a tick, in groups of 8")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "long"
        make_run(run, args.ticks, args.responses, args.tokens)
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "llamarl.cli.main", "report", str(run)], check=True)
        report_s = time.perf_counter() - began
        page = run / "report.html"
        data = data_bytes(page)
        opened = [open_page(page) for _ in range(args.repeats)]
    data_mb = (data["page"] - data["charts"]) / 1e6
    results: dict[str, Any] = {
        "ticks": args.ticks,
        "responses": args.ticks * args.responses,
        "report_s": report_s,
        "page_mb": data["page"] / 1e6,
        "data_mb": data_mb,
        "open_s": {view: spread([one[view] for one in opened]) for view in min(opened, key=len)},
    }
    print(json.dumps(results, indent=1))
    claims = [
        claim("MB of the page beside the charting script", data_mb, 5.0, at_least=False),
        claim("s to the words of the summary", results["open_s"]["summary, words"]["median"], 3.0, at_least=False),
        claim("s to its chart", results["open_s"]["summary, chart"]["median"], 3.0, at_least=False),
    ]
    write_report(args.json, results, claims)


def make_run(folder: Path, ticks: int, responses: int, tokens: int) -> None:
    """Files as a run writes them, with random responses."""
    noise = random.Random(0)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text(
        f"[run]\nnum_ticks = {ticks}\n[algorithm]\nname = 'aipo'\nadvantage = 'group_mean'\n"
    )
    rows, events = [], []
    for lane, name in enumerate(EXECUTORS, start=1):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}})
    for tick in range(ticks):
        reward = min(0.9, 0.2 + tick / ticks)
        lines = [sample(noise, tick, number, tokens, reward) for number in range(responses)]
        (folder / "rollouts" / f"tick_{tick:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        values = {f"metric/{number}": noise.random() for number in range(40)}
        rows.append(
            {"step": tick, "policy_version": tick + 1, "reward/mean": reward, "entropy": noise.random(), **values}
        )
        for lane, (start, end) in enumerate(EXECUTORS.values(), start=1):
            at, length = (tick + start) * 1e6, (end - start + 0.1 * noise.random()) * 1e6
            common = {"ph": "X", "pid": 1, "tid": lane, "args": {"tick": tick}}
            events.append({"name": f"tick {tick}", "cat": "tick", "ts": at, "dur": length, **common})
            events += [
                {"name": f"part {n}", "cat": "span", "ts": at + n, "dur": length / 3, **common} for n in range(3)
            ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "trace.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")


def sample(noise: random.Random, tick: int, number: int, tokens: int, reward: float) -> dict[str, Any]:
    version, length = max(0, tick - 1), noise.randint(tokens // 2, 3 * tokens // 2)
    return {
        "tick": tick,
        "prompt_index": (tick * 256 + number) // 8,
        "sample_index": number % 8,
        "task": "made",
        "prompt": f"Question {(tick * 256 + number) // 8}: " + " ".join(noise.choices(WORDS, k=30)),
        "response": " ".join(noise.choices(WORDS, k=length)),
        "answer": str(number),
        "reward": float(noise.random() < reward),
        "reward_parts": {},
        "failure": None,
        "finish_reason": "stop",
        "segments": [[version, length]],
        "prompt_tokens": [1] * 40,
        "tokens": noise.choices(range(32000), k=length),
        "behavior_logprobs": [-round(noise.expovariate(3.0), 7) for _ in range(length)],
        "policy_versions": [version] * length,
        "loss_mask": [1] * length,
        "metadata": {},
    }


def data_bytes(page: Path) -> dict[str, int]:
    text = page.read_text(encoding="utf-8")
    charts = text.partition('id="block:charts">')[2].partition("</script>")[0]
    return {"page": len(text.encode()), "charts": len(charts)}


def open_page(page: Path) -> dict[str, float]:
    """Seconds since the navigation, by the page's own clock, in contexts that have opened nothing before."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    ready = {"summary/0": '.chart[data-drawn="1"]', "timeline/0": '.chart.tall[data-drawn="1"]', "rollouts/0": "#found"}
    seconds = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for view, selector in ready.items():
            context = browser.new_context(viewport={"width": 1280, "height": 860})
            tab = context.new_page()
            tab.goto(f"{page.as_uri()}#/{view}", wait_until="commit")
            tab.wait_for_selector(selector, timeout=120_000)
            marks = tab.evaluate(
                "['words', 'chart'].map(n => (performance.getEntriesByName('llamarl:' + n)[0] || {}).startTime)"
            )
            for name, at_ms in zip(("words", "chart"), marks, strict=True):
                if at_ms is not None:
                    seconds[f"{view.split('/')[0]}, {name}"] = round(at_ms / 1e3, 3)
            context.close()
        browser.close()
    return seconds


if __name__ == "__main__":
    main()
