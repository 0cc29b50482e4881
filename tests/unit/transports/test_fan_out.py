"""Who reads from whom, so that the owner sends one copy."""

from __future__ import annotations

from llamarl.transports.fan_out import Answer, Relay, join_chain


def test_each_host_reads_from_the_one_before_it_and_its_other_processes_read_the_copy_there() -> None:
    chain, answer = join_chain([], Relay("b", "at b"))
    assert answer == Answer(relays=True, mirror="")
    chain, answer = join_chain(chain, Relay("c", "at c"))
    assert answer == Answer(relays=True, mirror="at b")
    again, answer = join_chain(chain, Relay("c", "a second rank of c"))
    assert (again, answer) == (chain, Answer(relays=False, mirror="at c"))


def test_the_chain_begins_anew_once_one_says_that_the_copy_it_was_told_of_is_gone() -> None:
    before = [Relay("b", "old at b"), Relay("c", "old at c")]
    chain, answer = join_chain(before, Relay("c", "at c"))
    assert answer == Answer(relays=False, mirror="old at c")
    chain, answer = join_chain(chain, Relay("c", "at c"), gone="old at c")
    assert (chain, answer) == ([Relay("c", "at c")], Answer(relays=True, mirror=""))
    chain, answer = join_chain(
        chain, Relay("b", "at b"), gone="old at b"
    )  # it had asked before, and is not the first to say so
    assert (chain, answer) == ([Relay("c", "at c"), Relay("b", "at b")], Answer(relays=True, mirror="at c"))
    assert join_chain(chain, Relay("b", "a second rank of b"))[1] == Answer(relays=False, mirror="at b")
