"""The rules of the games that come with llamarl and of those in ``examples/games``, against episodes worked out by hand."""

import json
import random
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from frozen_lake import FrozenLake
from guess_number import GuessNumber
from hypothesis import given, settings
from hypothesis import strategies as st
from word_games import FIVE_LETTERS, AlphabetSort, Wordle, marks, some_words

import llamarl
from llamarl.data.items import TaskItem
from llamarl.environments.episode import Environment, EpisodeOver, Step
from llamarl.environments.games.game import said
from llamarl.environments.games.mastermind import Mastermind, compare
from llamarl.environments.games.second_try import SecondTry
from llamarl.environments.registry import make_environment

EXAMPLES = Path(__file__).parents[3] / "examples/games"
NO_WORDS = TaskItem(question="")


def play(game: Environment, replies: list[str], seed: int = 0, item: TaskItem = NO_WORDS) -> list[Step]:
    game.reset(item, seed)
    return [game.step(reply) for reply in replies]


def map_of(text: str, size: int) -> list[str]:
    return text.splitlines()[-size:]


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        ("left", "left"),
        ("I go\n\n right \n", "right"),
        ("<think>left?\nno</think>\nDown", "down"),
        ("my move is [up], I hope", "up"),
        ("<answer>left</answer> or <answer>up</answer>", "up"),
        ("", ""),
        ("  \n ", ""),
    ],
)
def test_the_move_is_looked_for_in_the_marked_part_or_the_last_line(reply: str, part: str) -> None:
    assert said(reply) == part


def test_a_policy_that_opens_one_answer_after_another_costs_no_seconds() -> None:
    begun = time.process_time()
    assert said("<answer>Left</answer>" + "<answer>" * 3000) == "left"
    assert time.process_time() - begun < 0.5


def test_the_smallest_lake_is_walked_around_its_one_hole() -> None:
    # Two by two with one hole: P.  or  PO   so the way is right, down or down, right.
    #                           OG      .G
    for seed in range(4):
        lake = FrozenLake(size=2, holes=1)
        shown = map_of(lake.reset(NO_WORDS, seed).text, 2)
        first, second = ("right", "down") if shown[0] == "P." else ("down", "right")
        assert shown == (["P.", "OG"] if first == "right" else ["PO", ".G"])
        one, two = lake.step(first), lake.step(second)
        assert map_of(one.text, 2) == ([".P", "OG"] if first == "right" else [".O", "PG"])
        assert (one.done, one.reward, two.done, two.reward) == (False, 0.0, True, 1.0)
        assert two.parts == {"moves": 1.0, "invalid": 0.0, "correct": 1.0}
        fall = play(FrozenLake(size=2, holes=1), [second], seed)[0]
        assert (fall.done, fall.reward, fall.text) == (True, 0.0, "You fell into a hole.")


def test_a_wall_stops_and_nonsense_takes_a_move() -> None:
    steps = play(FrozenLake(size=3, holes=0, max_moves=3), ["up", "hm", "left"])
    assert map_of(steps[0].text, 3) == ["P..", "...", "..G"]
    assert steps[1].text.startswith("Write one move") and steps[1].parts["invalid"] == 1.0
    assert steps[2].done and not steps[2].truncated and steps[2].reward == 0.0


def test_every_lake_has_a_way_and_the_asked_number_of_holes() -> None:
    for seed in range(200):
        rows = map_of(FrozenLake(size=5, holes=16).reset(NO_WORDS, seed).text, 5)
        assert sum(row.count("O") for row in rows) == 16
        reached, fresh = {(0, 0)}, [(0, 0)]
        while fresh:
            r, c = fresh.pop()
            for cell in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
                if cell not in reached and 0 <= cell[0] < 5 and 0 <= cell[1] < 5 and rows[cell[0]][cell[1]] != "O":
                    reached.add(cell)
                    fresh.append(cell)
        assert (4, 4) in reached


def test_near_shows_nine_cells_and_the_shore() -> None:
    assert FrozenLake(size=3, holes=0, view="near", style="compact").reset(NO_WORDS, 0).text == "###\n#p=\n#=="


def test_maps_bounds_the_number_of_different_lakes() -> None:
    lake = FrozenLake(size=4, holes=3, maps=5)
    assert len({lake.reset(NO_WORDS, seed).text for seed in range(200)}) <= 5


def test_slipping_follows_the_seed_and_goes_sideways() -> None:
    lake = FrozenLake(size=3, holes=0, slip=1.0)
    ends = {tuple(map_of(play(lake, ["down"], seed)[0].text, 3)) for seed in range(20)}
    assert ends == {(".P.", "...", "..G"), ("P..", "...", "..G")}  # right, or left against the shore


def test_guesses_are_told_higher_and_lower() -> None:
    game = GuessNumber(low=1, high=3, max_moves=4)
    secrets = {}
    for seed in range(30):
        steps = play(game, ["2"], seed)
        word = steps[0].text.split()[0]
        secrets[word] = steps[0]
    assert set(secrets) == {"My", "Right,"}
    assert secrets["Right,"].reward == 1.0
    for seed in range(30):
        low, *rest = (
            play(game, ["2", "1"], seed) if "lower" in play(game, ["2"], seed)[0].text else play(game, ["2"], seed)
        )
        if rest:
            assert low.text == "My number is lower than 2. 3 guesses left." and rest[0].reward == 1.0


@pytest.mark.parametrize("reply", ["", "five", "0", "101", "1.5", "99999999999999999999"])
def test_a_guess_outside_the_range_gets_a_hint(reply: str) -> None:
    step = play(GuessNumber(), [reply])[0]
    assert step.text == "Write one whole number from 1 to 100." and step.parts["invalid"] == 1.0 and not step.done


@pytest.mark.parametrize(
    ("guess", "secret", "counts"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], (4, 0)),
        ([1, 1, 2, 2], [2, 2, 1, 1], (0, 4)),
        ([1, 1, 1, 2], [1, 2, 3, 3], (1, 1)),
        ([5, 5, 5, 5], [5, 1, 5, 2], (2, 0)),
        ([6, 6, 1, 2], [3, 4, 5, 5], (0, 0)),
        ([1, 2, 2, 3], [2, 1, 3, 3], (1, 2)),
    ],
)
def test_mastermind_counts(guess: list[int], secret: list[int], counts: tuple[int, int]) -> None:
    assert compare(guess, secret) == counts


def test_mastermind_is_won_by_the_code_that_fits_all_answers() -> None:
    game = Mastermind(pegs=2, colors=3, max_moves=9, style="compact")
    for seed in range(30):
        assert game.reset(NO_WORDS, seed).text == "2 of 1 to 3"
        codes = [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
        while True:
            guess = codes[0]
            step = game.step(f"{guess[0]}{guess[1]}")
            if step.done:
                break
            placed, misplaced = int(step.text[1]), int(step.text[4])
            codes = [code for code in codes if compare(guess, code) == (placed, misplaced)]
        assert step.reward == 1.0 and step.text == "right"


@pytest.mark.parametrize("reply", ["", "12", "123", "1 2 3 4 5", "7 7 7 7", "0000", "abcd"])
def test_mastermind_asks_for_the_right_number_of_digits(reply: str) -> None:
    assert play(Mastermind(), [reply])[0].text == "Write 4 digits from 1 to 6, such as 1234."


@pytest.mark.parametrize("reply", ["1234", "1 2 3 4", "1, 2, 3, 4", "I try [1 2 3 4].", "<answer>1234</answer>"])
def test_mastermind_reads_digits_in_several_spellings(reply: str) -> None:
    assert play(Mastermind(), [reply], seed=3)[0].text == play(Mastermind(), ["1234"], seed=3)[0].text


@pytest.mark.parametrize(
    ("guess", "secret", "shown"),
    [
        ("crane", "crane", "====="),
        ("speed", "abide", "##+#+"),
        ("speed", "erase", "+#++#"),
        ("speed", "steal", "=#=##"),
        ("allee", "apple", "=+##="),
        ("geese", "these", "##==="),
        ("aaaaa", "abide", "=####"),
    ],
)
def test_wordle_marks_each_letter_once(guess: str, secret: str, shown: str) -> None:
    assert marks(guess, secret) == shown


def test_wordle_hints_and_lists() -> None:
    assert play(Wordle(), ["too long a word?"])[0].text == "Write one word of five letters."
    assert play(Wordle(listed=True), ["zzzzz"])[0].text.startswith("zzzzz is not in my list")
    (secret,) = some_words(1)
    assert play(Wordle(num_words=1), [f"Is it {secret.upper()}?"])[0].reward == 1.0


def test_the_word_list_holds_hundreds_of_words_of_five_letters_once() -> None:
    assert len(FIVE_LETTERS) >= 500 and list(FIVE_LETTERS) == sorted(set(FIVE_LETTERS))
    assert all(len(word) == 5 and word.isascii() and word.islower() and word.isalpha() for word in FIVE_LETTERS)


def test_alphabet_sort_scores_each_turn_and_remembers() -> None:
    game = AlphabetSort(turns=3, first=2, more=1, style="compact")
    words = game.reset(NO_WORDS, 5).text.split()[1:]
    one = game.step(" ".join(sorted(words)))
    words += one.text.split()[1:]
    two = game.step(" ".join(sorted(words, reverse=True)))
    words += two.text.split()[1:]
    three = game.step(" ".join(sorted(words)))
    assert (one.reward, three.reward, three.done) == (1 / 3, 1 / 3, True)
    # Three letters the wrong way round: one of three matches, so the similarity is 2 * 1 / 6.
    assert two.reward == pytest.approx((1 / 3) ** 4 / 3)
    assert (one.parts["correct"], three.parts["correct"]) == (0.0, 0.0)


def test_alphabet_sort_right_in_all_turns_is_correct_and_worth_one() -> None:
    game = AlphabetSort()
    words = game.reset(NO_WORDS, 1).text.rpartition(": ")[2].split()
    total, step = 0.0, None
    for _ in range(3):
        step = game.step(f"Here it is:\n<answer>{' '.join(sorted(words))}</answer>")
        total += step.reward
        words += step.text.rpartition(": ")[2].split()
    assert step is not None and step.parts["correct"] == 1.0 and total == pytest.approx(1.0)


def test_a_second_try_is_worth_half_and_a_first_one_all() -> None:
    item = TaskItem(question="What is 2 + 2?", answer="4")
    first = play(SecondTry(), ["4"], item=item)
    assert (first[0].reward, first[0].done, first[0].parts["first_try"]) == (1.0, True, 1.0)
    wrong, right = play(SecondTry(feedback="{score} {left}"), ["5", "It is 4."], item=item)
    assert (wrong.reward, wrong.done, wrong.text) == (0.0, False, "0 1")
    assert (right.reward, right.done, right.parts["correct"], right.parts["first_try"]) == (0.5, True, 1.0, 0.0)
    assert play(SecondTry(), ["5", "6"], item=item)[1].reward == 0.0


def test_a_second_try_of_a_reasoning_gym_task_is_scored_by_the_dataset() -> None:
    from llamarl.environments.reasoning_gym import ReasoningGymTask

    task = ReasoningGymTask("chain_sum", {"min_terms": 2, "max_terms": 2}, seed=7, eval_fraction=0.1)
    item = task.item("train", 3)
    game = make_environment("second_try", {"dataset": "chain_sum", "min_terms": 2, "max_terms": 2})
    assert game.reset(item, 0).text == item.question
    assert item.answer is not None
    assert game.step("no idea").done is False and game.step(item.answer).reward == 0.5
    made_up = game.reset(NO_WORDS, 11).text  # without words: a question of the seed
    assert made_up == game.reset(NO_WORDS, 11).text != game.reset(NO_WORDS, 12).text


def test_a_game_is_over_once() -> None:
    for game in (GuessNumber(max_moves=1), AlphabetSort(turns=1), SecondTry(attempts=1, dataset="chain_sum")):
        game.reset(NO_WORDS, 0)
        assert game.step("x").done
        with pytest.raises(EpisodeOver):
            game.step("x")


PLAYED: Mapping[str, Mapping[str, Any]] = {
    "mastermind": {},
    "second_try": {"dataset": "chain_sum"},
    f"{EXAMPLES}/frozen_lake.py:FrozenLake": {"slip": 0.3},
    f"{EXAMPLES}/guess_number.py:GuessNumber": {},
    f"{EXAMPLES}/word_games.py:Wordle": {},
    f"{EXAMPLES}/word_games.py:AlphabetSort": {},
    f"{EXAMPLES}/calculator.py:Calculator": {},
}


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PLAYED)),
    seed=st.integers(0, 2**64 - 1),
    more=st.lists(st.text(max_size=40), max_size=3),
)
def test_replaying_the_replies_gives_equal_steps(name: str, seed: int, more: list[str]) -> None:
    """The property that lets an episode be rebuilt anywhere; rewards stay within [0, 1] and the end comes."""
    game = make_environment(name, PLAYED[name])
    first = game.reset(NO_WORDS, seed)
    rng = random.Random(seed)
    replies, steps = [], []
    while not (steps and steps[-1].done):
        reply = more.pop() if more else game.random_reply(rng)  # type: ignore[attr-defined]
        replies.append(reply)
        steps.append(game.step(reply))
        assert len(steps) <= 20
    assert 0.0 <= sum(step.reward for step in steps) <= 1.0 + 1e-9
    random.seed(1)  # no game may look at the global generator
    again = make_environment(name, PLAYED[name])
    assert again.reset(NO_WORDS, seed) == first
    assert [again.step(reply) for reply in replies] == steps


@pytest.mark.parametrize("name", sorted(PLAYED.keys() - {"second_try"}))
def test_the_compact_style_uses_only_characters_of_the_bundled_model(name: str) -> None:
    file = Path(llamarl.__file__).parent / "assets/tiny/tokenizer.json"
    known = {token for token in json.loads(file.read_text())["model"]["vocab"] if len(token) == 1}
    assert set(string.ascii_lowercase) < known
    for seed in range(10):
        game = make_environment(name, {"style": "compact"})
        said_so_far = game.reset(NO_WORDS, seed).text
        rng = random.Random(seed)
        for turn in range(20):
            reply = "nonsense" if turn == 1 else game.random_reply(rng)  # type: ignore[attr-defined]
            assert set(reply) <= known, reply
            step = game.step(reply)
            if step.done:
                break
            assert step.text and step.text == step.text.strip("\n")
            said_so_far += step.text
        assert set(said_so_far) <= known, set(said_so_far) - known


def test_live_episodes_of_one_dataset_share_its_words() -> None:
    """A thousand of them live in a worker; some datasets hold megabytes."""
    one, other = (make_environment("second_try", {"dataset": "spell_backward", "max_word_len": 5}) for _ in range(2))
    another = make_environment("second_try", {"dataset": "spell_backward", "max_word_len": 6})
    assert isinstance(one, SecondTry) and isinstance(other, SecondTry) and isinstance(another, SecondTry)
    assert one._task is other._task is not another._task
    assert one.reset(NO_WORDS, 3) == other.reset(NO_WORDS, 3)
    assert one.reset(NO_WORDS, 5) != other.reset(NO_WORDS, 7)
    assert other.step("").text and one.step("").text  # the tries are each one's own
