"""The tiny job with its ranks in spaces that see nothing of one another's memory: the same run, read over sockets."""

import json
import re
from pathlib import Path

import pytest
import spaces_job
from conftest import RECIPE, SMALL, as_flags, rows
from forked_command import SERVER
from other_space import place
from same_run import assert_same_run

from llamarl.transports.network import Network

SPREAD = {
    "generator": [place("b"), place("e")],  # one reads the weights and passes them on to the other
    "reward": [place("c")],
    "trainer": [place("a"), place("d")],
    "evaluator": [place("a")],
}


def train(run_dir: Path, networks: dict[str, list[Network]] | None, **more: object) -> str:
    """The run, in a process that has imported torch; what an executor's failure said, or nothing."""
    settings = SMALL | {
        "run.num_ticks": 3,
        "run.dir": json.dumps(str(run_dir)),
        "trainer.fsdp": 2,
        "generator.dp": 2,
        "generator.max_segments": 2,
        "generator.oversubscription": 1.5,
        **more,
    }
    words = as_flags(settings)
    failure = run_dir.with_name("failure")
    process = SERVER.Process(target=spaces_job.train, args=(RECIPE, words, networks, failure))
    process.start()
    process.join(240)
    ended = process.exitcode
    process.kill()
    assert ended == 0
    return failure.read_text()


def test_a_job_over_four_spaces_gives_the_bits_of_one_machine(tmp_path: Path) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    assert train(one, None) == ""
    assert train(four, SPREAD) == ""
    assert_same_run(four, one)
    assert len(rows(one)) == 3


@pytest.mark.long
def test_unlike_replicas_over_spaces_give_the_bits_of_one_machine(tmp_path: Path) -> None:
    """Each kind in a space of its own, the weights in float32 for both."""
    unlike = {"generator.dp": 1, "generator.replicas": '[{tp = 2}, {share = 2, dtype = "bfloat16"}]'}
    one, apart = tmp_path / "one", tmp_path / "apart"
    assert train(one, None, **unlike) == ""
    assert train(apart, {**SPREAD, "generator": [place("b"), place("b"), place("e")]}, **unlike) == ""
    assert_same_run(one, apart)


def test_an_executor_with_another_key_reads_nothing(tmp_path: Path) -> None:
    said = train(tmp_path / "run", {**SPREAD, "reward": [place("c", key=bytes(32))]})
    assert re.search("channel 'completions': 'reward' rank 0 cannot read.*another run's", said), said
