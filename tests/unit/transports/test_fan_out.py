"""Who reads from whom: what each host sends, and how long the last one waits."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from llamarl.transports.fan_out import CHAIN, Answer, Seat, hops, reads_from, take_seat


def finish_time(num_hosts: int, blocks: int) -> int:
    """Simulated on its own: the tick at which the last host has the last block. In a tick a link carries one block, each way;
    a host sends a block to its readers in turn, and not before it has it."""
    readers: dict[int | None, list[int]] = {}
    for host in range(num_hosts):
        readers.setdefault(reads_from(host), []).append(host)
    has = {host: [math.inf] * blocks for host in range(num_hosts)}
    for sender in [None, *range(num_hosts)]:  # whom a host reads from comes before it
        free = 0
        for block in range(blocks):
            start = 0 if sender is None else has[sender][block]
            for reader in readers.get(sender, []):
                free = max(free, start) + 1
                has[reader][block] = free
    return int(max(times[-1] for times in has.values()))


def test_the_owner_sends_one_copy_however_many_hosts_read() -> None:
    for count in (1, 2, 8, 100, 5000):
        sent = Counter(reads_from(seat) for seat in range(count))
        assert sent[None] == 1
        assert max(sent.values()) <= 2


def test_whom_a_host_reads_from_is_seated_before_it() -> None:
    assert [reads_from(seat) for seat in range(4)] == [None, 0, 1, 2]
    assert [reads_from(seat) for seat in range(CHAIN, CHAIN + 6)] == [CHAIN - 1] * 2 + [CHAIN] * 2 + [CHAIN + 1] * 2
    assert [hops(seat) for seat in (0, 1, CHAIN - 1, CHAIN, CHAIN + 1, CHAIN + 2, CHAIN + 6)] == [
        1, 2, CHAIN, CHAIN + 1, CHAIN + 1, CHAIN + 2, CHAIN + 3,
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 4, 8, 64, 256, 1000])
def test_time_for_many_hosts_grows_with_less_than_their_logarithm(count: int) -> None:
    blocks = 350  # SmolLM2-135M in bfloat16
    assert finish_time(1, blocks) == 350
    assert finish_time(count, blocks) <= blocks * (1 + math.log2(count))
    if count <= 8:
        assert (
            finish_time(count, blocks) == blocks + count - 1
        )  # worked by hand: one block's time for each host between


def test_a_space_has_one_seat_and_its_other_processes_read_the_copy_there() -> None:
    seats, answer = take_seat([], Seat("b", "at b"))
    assert answer == Answer(relays=True, mirror="")
    seats, answer = take_seat(seats, Seat("c", "at c"))
    assert answer == Answer(relays=True, mirror="at b")
    again, answer = take_seat(seats, Seat("c", "a second rank of c"))
    assert (again, answer) == (seats, Answer(relays=False, mirror="at c"))


def test_all_are_seated_anew_once_one_says_that_the_copy_it_was_told_of_is_gone() -> None:
    before = [Seat("b", "old at b"), Seat("c", "old at c")]
    seats, answer = take_seat(before, Seat("c", "at c"))
    assert answer == Answer(relays=False, mirror="old at c")
    seats, answer = take_seat(seats, Seat("c", "at c"), gone="old at c")
    assert (seats, answer) == ([Seat("c", "at c")], Answer(relays=True, mirror=""))
    seats, answer = take_seat(
        seats, Seat("b", "at b"), gone="old at b"
    )  # it had asked before, and is not the first to say so
    assert (seats, answer) == ([Seat("c", "at c"), Seat("b", "at b")], Answer(relays=True, mirror="at c"))
    assert take_seat(seats, Seat("b", "a second rank of b"))[1] == Answer(relays=False, mirror="at b")
