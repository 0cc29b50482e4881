"""The index of all responses, the choice of those that the page carries, and their detail."""

import json
from pathlib import Path

import pytest
from made_run import MadeRun, decode_block

from llamarl.observability.findings import FLAGS
from llamarl.observability.rollouts import read_rollouts, tick_files
from llamarl.report.page import encode_block
from llamarl.report.rollout_index import TickIndex, choose_groups, detail_of_tick, index_columns, index_file
from llamarl.report.texts import find_tokenizer, flags_of, is_repetitive, other_script, piece_reader
from llamarl.types import Failure, Turn


def _index(tick: int, rewards: list[list[float | None]], num_bytes: int = 10) -> TickIndex:
    index = TickIndex(tick)
    for group, values in enumerate(rewards):
        for sample, value in enumerate(values):
            index.prompt.append(group)
            index.sample.append(sample)
            index.reward.append(value)
            index.failure.append("" if value is not None else "exception: ValueError: no")
            index.flags.append(0)
            index.length.append(5)
            index.finish.append("stop")
            index.num_bytes.append(num_bytes)
    return index


def test_every_number_of_the_index_is_that_of_the_file(tmp_path: Path) -> None:
    run = MadeRun(outcome=lambda t, g, s: Failure(kind="timeout", detail="2 s") if s == 1 else float(s)).write(
        tmp_path / "run"
    )
    for tick, path in tick_files(run / "rollouts"):
        index, rollouts = index_file(tick, path), list(read_rollouts(run, tick))
        assert index.prompt == [r.response.prompt_index for r in rollouts]
        assert index.length == [len(r.response.tokens) for r in rollouts]
        assert index.reward == [getattr(r.response.outcome, "value", None) for r in rollouts]
        assert [bool(cause) for cause in index.failure] == [isinstance(r.response.outcome, Failure) for r in rollouts]
        assert index.oldest == [int(r.response.policy_versions.min()) for r in rollouts]
        assert sum(index.tokens_of_version.values()) == sum(
            len(r.response.tokens) for r in rollouts if not isinstance(r.response.outcome, Failure)
        )
    assert index.failure[1] == "timeout: 2 s"


def test_torn_and_foreign_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = dict(tick_files(MadeRun(ticks=1).write(tmp_path / "run") / "rollouts"))[0]
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"tick": 0, "prompt_index": 1}\n[3]\n' + whole[:50])
    index = index_file(0, path)
    assert (len(index.reward), index.unreadable) == (8, 3)


def test_one_group_of_each_tick_is_chosen_before_a_second_of_any() -> None:
    indexes = [_index(tick, [[0.0, 1.0], [0.0, 1.0]]) for tick in range(4)]  # a group has 20 bytes
    assert choose_groups(indexes, 1e9) == {tick: [0, 1] for tick in range(4)}
    assert choose_groups(indexes, 100) == {0: [0, 1], 1: [0], 2: [0], 3: [0]}
    assert choose_groups(indexes, 60) == {0: [0], 1: [0], 3: [0]}  # ends first, then the middle
    assert choose_groups(indexes, 10) == {}


def test_telling_groups_come_first_and_the_rest_are_not_forgotten() -> None:
    index = _index(0, [[1.0, 1.0], [0.0, 1.0], [None, 1.0]])
    assert choose_groups([index], 20) == {0: [2]}  # a failure
    assert choose_groups([index], 40) == {0: [2, 1]}  # then a group with a signal
    assert choose_groups([index], 60) == {0: [2, 1, 0]}


def test_detail_holds_text_tokens_and_histories_of_the_chosen_groups_alone(tmp_path: Path) -> None:
    run = MadeRun(text=lambda t, g, s: f"</script> & ' \" \u2028 {s}").write(tmp_path / "run")
    detail = decode_block(
        encode_block(detail_of_tick(2, dict(tick_files(run / "rollouts"))[2], [21], lambda ids: None))
    )
    (group,) = detail["groups"]
    assert (group["prompt_index"], group["prompt"], group["answer"]) == (21, "question 21", "42")
    last = group["samples"][3]
    assert last["text"] == "</script> & ' \" \u2028 3"
    assert last["ids"] == [7, 8, 9, 10, 11, 12] and last["logprobs"] == [-0.25, -0.5, -0.75, -1.0, -1.25, -1.5]
    assert last["versions"] == [[0, 1], [1, 5]] and last["mask"] == [[1, 6]]


def test_detail_of_an_episode_holds_each_turn_and_what_was_said(tmp_path: Path) -> None:
    turn = Turn(
        start=0, end=2, finish_reason="stop", reply="a</b>", reward=0.25, parts={"moves": 1.0}, observation="no"
    )
    run = MadeRun(ticks=1, turns=lambda t, g, s: (turn,) if s == 1 else ()).write(tmp_path / "run")
    (group,) = detail_of_tick(0, dict(tick_files(run / "rollouts"))[0], [0], lambda ids: None)["groups"]
    assert [sample["turns"] for sample in group["samples"][:2]] == [
        [],
        [
            {
                "start": 0,
                "end": 2,
                "finish": "stop",
                "reply": "a</b>",
                "reward": 0.25,
                "parts": {"moves": 1.0},
                "observation": "no",
            }
        ],
    ]


def test_blocks_hold_no_character_that_html_knows_and_turn_infinity_into_nothing() -> None:
    text = encode_block({"a": "</script><!-- <script>", "b": [float("nan"), 1.5]})
    assert not set(text) & set("<>&\"' \n") and decode_block(text) == {"a": "</script><!-- <script>", "b": [None, 1.5]}


def test_pieces_of_tokens_join_to_the_response(tmp_path: Path) -> None:
    path = find_tokenizer(tmp_path, "bundled:tiny")
    pieces = piece_reader(path)([18, 5, 12, 6, 13, 2, 4, 14, 1])
    assert pieces == ["b", "+", "5", "=", "6", "\n", "#", "7", "<eos>"]
    assert piece_reader(None)([1]) is None
    assert find_tokenizer(tmp_path, str(tmp_path / "gone")) is None
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    assert piece_reader(broken)([1]) is None


def test_the_tokenizer_of_a_model_of_the_hub_comes_from_the_cache_and_is_never_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*args: object, **kwargs: object) -> Path:
        raise AssertionError("asked the Hub")

    monkeypatch.setattr("llamarl.models.folders._download", fetched)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    commit = "0123456789" * 4
    assert find_tokenizer(tmp_path, f"org/name@{commit}") is None
    snapshot = tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")  # of a model without its weights
    assert find_tokenizer(tmp_path, f"org/name@{commit}") == snapshot / "tokenizer.json"


def test_columns_name_what_repeats_once_and_keep_every_response(tmp_path: Path) -> None:
    run = MadeRun().write(tmp_path / "run")
    indexes = [index_file(*place) for place in tick_files(run / "rollouts")]
    columns = index_columns(indexes, {3: [30]})
    assert len(columns["reward"]) == 6 * 2 * 4 and columns["tables"]["reward"] == [0.0, 1.0]
    assert columns["groups"]["detail"] == [
        int(tick == 3 and prompt == 30) for tick in range(6) for prompt in (10 * tick, 10 * tick + 1)
    ]
    assert columns["oldest"][:4] == [0, 0, 0, 0] and columns["oldest"][-4:] == [1, 2, 2, 2]  # staleness, not version
    assert json.loads(json.dumps(columns)) == columns


def test_samples_of_another_program_without_log_probs_are_shown_and_one_without_tokens_is_left_out(
    tmp_path: Path,
) -> None:
    path = dict(tick_files(MadeRun(ticks=1).write(tmp_path / "run") / "rollouts"))[0]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        del record["behavior_logprobs"]
    del records[7]["tokens"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    index = index_file(0, path)
    assert (len(index.length), index.unreadable) == (7, 1)
    (group,) = detail_of_tick(0, path, [0], lambda ids: None)["groups"]
    assert [sample["logprobs"] for sample in group["samples"]] == [[None] * (3 + s) for s in range(4)]


def test_tokens_of_another_model_than_the_policy_have_no_age(tmp_path: Path) -> None:
    path = dict(tick_files(MadeRun().write(tmp_path / "run") / "rollouts"))[5]
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records[1]["sampled_by"] = "teacher"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    index = index_file(5, path)
    assert (index.oldest[:3], index.newest[:3]) == ([4, -1, 3], [4, -1, 4])
    assert index_columns([index], {})["oldest"][:3] == [1, -1, 2]  # staleness
    samples = detail_of_tick(5, path, [50], lambda ids: None)["groups"][0]["samples"]
    assert [sample["sampled_by"] for sample in samples] == ["", "teacher", "", ""]


def test_prompts_that_begin_alike_are_told_apart_and_the_same_one_is_known_again(tmp_path: Path) -> None:
    system = "You are a careful assistant. " * 10  # 290 characters
    run = MadeRun(ticks=2, groups=3, prompt=lambda t, g: system + ("again" if g == 0 else f"{t}.{g}")).write(
        tmp_path / "run"
    )
    columns = index_columns([index_file(*place) for place in tick_files(run / "rollouts")], {})
    first, second = columns["groups"]["text"][:3], columns["groups"]["text"][3:]
    assert len(set(first + second)) == 5 and first[0] == second[0]
    assert all(text.startswith(system[:200] + "\0") for text in columns["tables"]["prompt_text"])


# Texts that are garbage.


PROSE = (
    "To find the number of apples we first count those in the basket, which are twelve, then add the five that Mary brings "
    "along in the afternoon. That makes seventeen. Since her brother eats two of them on the way home, fifteen remain, and "
    "divided among three children each of them gets exactly five apples, with none left over for the horse in the stable."
)


@pytest.mark.parametrize("text", ["the same again, " * 20, "!" * 200, PROSE + " I am sorry." * 30, "ab\n" * 100])
def test_a_text_that_runs_in_circles_is_repetitive(text: str) -> None:
    assert is_repetitive(text)


@pytest.mark.parametrize(
    "text", [PROSE, "", "4", "1000000000000", "1, 1, 2, 3, 5, 8, 13, 21", "x = 3\n" * 5, "-" * 60 + "\n" + PROSE]
)
def test_good_answers_are_not(text: str) -> None:
    assert not is_repetitive(text)


def test_another_script_than_the_prompts_is_told_from_formulas_and_from_the_prompts_own() -> None:
    assert other_script("Ответ на этот вопрос пять", "How many apples are there?")
    assert not other_script("Ответ на этот вопрос пять", "Сколько яблок?")
    assert not other_script("The angle α is π/3, so cos α = ½ and ∑ is ∞", "What is the angle?")
    assert not other_script("Naïve résumé of the façade", "Spell these words")
    assert not other_script("Пять", "How many?")  # too few letters to say


def test_flags_are_bits_in_the_order_of_their_names() -> None:
    assert FLAGS == ("repetition", "cut", "script", "empty")
    assert flags_of("five", "How many?", "stop") == 0
    assert flags_of("five", "How many?", "length") == 0b0010
    assert flags_of(" \n", "How many?", "stop") == 0b1000
    assert flags_of("again and " * 40, "How many?", "length") == 0b0011
