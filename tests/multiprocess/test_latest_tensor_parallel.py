"""``schedule.weights = "latest"`` on two ranks: both swap before the same step, once both have the version."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import join_group, run_ranks

from llamarl.observability.events import EVENTS_FILE, REPLAY_FILE, EventLog

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit" / "executors"))
from lone_generators import generator
from test_generator_in_flight import recipe, run

ARRIVALS = [[0, 6, 0, 11, 3], [0, 9, 0, 2, 3]]
"""By rank: at which look of each tick the next version is there. The later of two counts."""


def main(rank: int, tp: int, folder: Path) -> None:
    torch.set_num_threads(1)
    asked = ARRIVALS[rank] if tp > 1 else list(map(max, *ARRIVALS))
    config = recipe(tp)
    folder = folder / str(tp)
    folder.mkdir(exist_ok=True)
    if tp > 1:
        join_group(rank, 2, folder / "rendezvous")
    made = run(generator(config, rank=rank), asked)
    events = [event for _, event in made]
    told = [[response.tokens.tolist() for group in groups for response in group.responses] for groups, _ in made]
    if tp > 1:  # the log of both ranks, as a run keeps it; then this rank's decisions again, with nothing to wait for
        gathered: list[list[dict[str, object]]] = [[] for _ in range(2)]
        dist.all_gather_object(gathered, events)
        if rank == 0:
            log = EventLog(folder)
            for tick in zip(*gathered, strict=True):
                log.append(tick)
            (folder / EVENTS_FILE).rename(folder / REPLAY_FILE)
        dist.barrier()
        again = run(generator(config, folder, rank), [0] * len(asked))
        assert [event for _, event in again] == events
    (folder / f"{rank}.json").write_text(json.dumps({"events": events, "tokens": told}))
    if tp > 1:
        dist.destroy_process_group()


def test_ranks_swap_together_when_the_last_of_them_has_the_version_and_a_log_repeats_them(tmp_path: Path) -> None:
    places = [(1, 0), (2, 0), (2, 1)]
    run_ranks(main, [(rank, tp, tmp_path) for tp, rank in places], limit_s=120)
    alone, first, second = (json.loads((tmp_path / str(tp) / f"{rank}.json").read_text()) for tp, rank in places)
    assert [event["swaps"] for event in first["events"]] == [
        [[0, 0]],
        [[0, 0], [9, 1]],
        [[0, 2]],
        [[0, 2], [11, 3]],
        [[0, 3], [3, 4]],
    ]
    same = [[{**event, "rank": 0} for event in rank["events"]] for rank in (first, second)]
    assert same[0] == same[1]  # steps, swaps and the digest of what was delivered, which the first rank alone hands on
    assert any(tokens for tick in first["tokens"] for tokens in tick)
    assert first["tokens"] == alone["tokens"]  # one rank to which versions come when the later of the two has them
