"""Runs with an engine and sinks from a user's file."""

import json
import re
from pathlib import Path

from conftest import CommandLine, rows

from llamarl.observability.keys import is_timing_key

MINE = """
import json
from llamarl.engine.engine import NativeEngine

class Counting(NativeEngine):
    def __init__(self, model_path, config, *, tokenizer, device):
        super().__init__(model_path, config, tokenizer=tokenizer, device=device)
        self.file = open(config.options["log"], "a")
    def step(self):
        ended = super().step()
        print(len(ended), file=self.file, flush=True)
        return ended

class Sink:
    def __init__(self, run_dir, config, resume_after_tick):
        self.path = run_dir / "mine.jsonl"
    def write(self, row):
        with self.path.open("a") as file:
            print(json.dumps(row), file=file)
    def close(self): ...

class Failing(Sink):
    def write(self, row):
        raise OSError("the database is away")
"""
INLINE = {
    "run.runtime": "inline",
    "run.num_ticks": 2,
    "evaluation.every": 0,
    "generator.threads": 1,
    "trainer.threads": 1,
    "generator.max_segments": 1,  # a sequence that ends is delivered in its tick
    "generator.oversubscription": 1.0,
}


def test_an_engine_and_a_sink_of_ones_own_change_no_bit(llamarl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    own = {
        "generator.engine.name": f"{tmp_path}/mine.py:Counting",
        "generator.engine.options.log": json.dumps(f"{tmp_path}/steps"),
        "observability.sinks": json.dumps([f"{tmp_path}/mine.py:{name}" for name in ("Failing", "Sink")]),
    }
    for name, settings in (("usual", INLINE), ("own", INLINE | own)):
        done = llamarl.train(tmp_path / name, settings)
    usual, found = rows(tmp_path / "usual"), rows(tmp_path / "own")
    plain = [[{k: v for k, v in row.items() if not is_timing_key(k)} for row in some] for some in (usual, found)]
    assert plain[0] == plain[1] and len(found) == 2
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("usual", "own")]
    assert weights[0] == weights[1]
    assert [json.loads(line) for line in (tmp_path / "own/mine.jsonl").read_text().splitlines()] == found
    ended = [int(line) for line in (tmp_path / "steps").read_text().split()]
    assert sum(ended) == sum(row["samples/delivered"] for row in found)  # the engine of one's own sampled them all
    said = r"mine.py:Failing' failed in write\(row\): OSError: the database is away at .*/mine.py:\d+: raise OSError.*It gets no more"
    assert len(re.findall(said, done.stdout)) == 1
