"""What a user may type wrong at ``generate``, ``eval`` and ``train``: exit code 2 and lines in the words that were typed.

In this process, and before any model is loaded; ``tests/end_to_end`` has the same verbs as processes.
"""

import argparse
import io
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from llamarl.cli import eval as eval_verb
from llamarl.cli import recipes
from llamarl.cli.main import command, main
from llamarl.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("own_signals")
RECIPE = str(Path(__file__).resolve().parents[3] / "recipes" / "tiny.toml")


@pytest.mark.parametrize("verb", ["train", "eval", "generate"])
def test_without_a_folder_for_temporary_files_the_way_out_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    (told,) = refused(capsys, verb, "bundled:tiny")
    assert "no folder for temporary files can be written" in told and "set TMPDIR" in told


@pytest.mark.parametrize("hosts", ["", " "])
def test_a_cluster_of_nothing_does_not_mean_this_machine(capsys: pytest.CaptureFixture[str], hosts: str) -> None:
    assert refused(capsys, "train", RECIPE, "--cluster", hosts, "--dry-run") == [
        "llamarl train: --cluster names no cluster; --cluster here runs on this machine alone"
    ]


@pytest.mark.parametrize("word", ["--hosts.on.trainer=['a']", "--hosts.cluster=auto"])
def test_hosts_named_in_two_ways_are_refused_together(capsys: pytest.CaptureFixture[str], word: str) -> None:
    (line,) = refused(capsys, "train", RECIPE, "--cluster", "auto", word, "--dry-run")
    assert "--cluster and --hosts.* say the same in two ways" in line


TOP_P = "Keep the smallest set of likeliest tokens with at least this probability; 1 keeps all"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines that a refused command prints."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and not captured.out
    return [line.removeprefix("  - ") for line in captured.err.splitlines()]


def test_every_wrong_flag_of_generate_is_told_at_once_by_its_own_name(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--temperature -1 --top-p 2 --top-k -1 --samples 0 --seed -1 --max-new-tokens 0 --stop=".split()
    assert refused(capsys, "generate", "bundled:tiny", "--prompt", "a1", *flags) == [
        "llamarl generate: 7 mistakes in the configuration:",
        "--max-new-tokens must be >= 1, got 0 (Longest response, in tokens)",
        "--temperature must be 0 (greedy) or at least 1e-06, got -1.0",
        "--top-k must be >= 0, got -1 (Keep the k likeliest tokens; 0 keeps all)",
        f"--top-p must be in (0, 1], got 2.0 ({TOP_P})",
        "--stop must not hold an empty string: it would end every response at once",
        "--samples must be >= 1, got 0",
        "--seed must be >= 0, got -1",
    ]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--top-p", "0"], f"--top-p must be in (0, 1], got 0.0 ({TOP_P})"),
        (
            ["--temperature", "nan"],
            "--temperature must be a finite number, got nan (Logits are divided by it; 0 is greedy)",
        ),
        (
            ["--quantization", "fp8"],
            "--quantization is 'fp8', which the native engine does not have on cpu (generator.device = 'auto', here cpu): "
            "use one of none, int8",
        ),
        (
            ["--output", "/no/such/folder/x"],
            "--output /no/such/folder/x: cannot be written (No such file or directory); give a file in a folder that exists",
        ),
    ],
)
def test_one_wrong_flag_of_generate_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], line: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused(capsys, "generate", "bundled:tiny", "--prompt", "a1", *flags) == [f"llamarl generate: {line}"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": 5}', "field 'prompt' is int 5, expected text"),
        ('{"prompt": [{"role": 5}]}', "field 'prompt' is [{'role': 5}], expected a list of {role, content}"),
        ('{"prompt": null}', "field 'prompt' is NoneType None, expected text"),
        ('{"messages": "hello"}', "field 'messages' is 'hello', expected a list"),
        ('{"messages": [{"role": "user", "content": 5}]}', "expected a list of {role, content}"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no chat template: give text instead of messages"),
        ('{"prompt": ""}', "gives a prompt without a token"),
        ('{"question": "a"}', 'expected an object with "prompt" or "messages"'),
        ('{"prompt": ', "not JSON"),
        pytest.param('{"prompt": "a", "n": ' + "9" * 5000 + "}", "thousands of digits", id="digits"),
        pytest.param('{"prompt": "a", "n": ' + "[" * 100_000 + "]" * 100_000 + "}", "64 levels deep", id="depth"),
        ('{"prompt": "a", "x": NaN}', "infinity or NaN"),
        ('{"prompt": "a", "x": 1e999}', "infinity or NaN"),
    ],
    ids=range(13),
)
def test_a_wrong_line_of_prompts_is_named_by_file_and_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, words: str
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a1 b2 =\\n"}\n\n' + line + "\n")
    (told,) = refused(capsys, "generate", "bundled:tiny", "--input", str(prompts))
    assert f"{prompts}:3: " in told and words in told


def test_prompts_that_are_not_utf8_or_not_there_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "\xff"}')
    (told,) = refused(capsys, "generate", "bundled:tiny", "--input", f"{tmp_path}/in.jsonl")
    assert "in.jsonl is not UTF-8 text (byte 12)" in told
    (told,) = refused(capsys, "generate", "bundled:tiny", "--input", f"{tmp_path}/none.jsonl")
    assert "none.jsonl cannot be read (No such file or directory)" in told


@pytest.mark.parametrize("source", ["file", "standard input"])
def test_lines_of_prompts_end_at_newlines_alone_and_a_byte_order_mark_is_passed_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    records = [{"prompt": "a1 b2 =\n", "note": "one\u2028two"}, {"prompt": "a2 b2 =\n", "note": "three"}]
    text = "\ufeff" + "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (tmp_path / "in.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    name = str(tmp_path / "in.jsonl") if source == "file" else "-"
    assert main(["generate", "bundled:tiny", "--input", name, "--max-new-tokens", "2"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(answer["note"] for answer in answers) == ["one\u2028two", "three"]


def test_wrong_flags_of_eval_are_told_by_their_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--prompts 0 --samples 0 --temperature -1 --evaluation.every -1".split()
    assert refused(capsys, "eval", "no/such/model", *flags) == [
        "llamarl eval: 5 mistakes in the configuration:",
        "evaluation.every must be >= 0, got -1 (Trainer ticks between evaluations, 0 for none; version 0 and the last version "
        "are then scored too)",
        "--prompts must be >= 1, got 0 (Held-out prompts of one evaluation)",
        "--samples must be >= 1, got 0 (Responses a prompt; accuracy is their mean, pass@k counts prompts with a right one "
        "among k)",
        "--temperature must be 0 (greedy) or at least 1e-06, got -1.0",
        "model: no folder no/such/model; give a Hugging Face folder, an id of the Hugging Face Hub (org/name), or one of bundled:tiny, bundled:tiny_moe",
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--responses", "/no/such/folder/x"], "--responses /no/such/folder/x: cannot be written"),
        (["--generator.quantization", "fp8"], "'fp8', which the native engine does not have on cpu (evaluation.device"),
        (["--evaluation.device", "gpu"], "cuda:N, or several joined by commas, one a rank, got 'gpu'"),
        (["--task.options", "{ min_terms = 'two' }"], "min_terms and max_terms of steps are integers"),
        (["--best-of", "bundled:tiny"], "holds LlamaForCausalLM, which has no score for a text"),
        (["--best-of", "/no/such/folder"], "--best-of: no folder /no/such/folder"),
    ],
)
def test_eval_refuses_before_it_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
) -> None:
    monkeypatch.setattr("llamarl.executors.evaluator.sample_groups", lambda *_, **__: pytest.fail("it sampled"))
    monkeypatch.setattr("llamarl.controller.preflight.available_cuda_devices", lambda: 0)
    assert words in refused(capsys, "eval", "bundled:tiny", *flags)[-1]


def test_a_recipe_may_stand_behind_its_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    override = ["--schedule.max_staleness", "-1"]
    said = [
        refused(capsys, *words)
        for words in (
            ["train", RECIPE, *override],
            ["train", *override, RECIPE],
            ["train", *override, "--dry-run", RECIPE],
            [*override, "train", RECIPE],
        )
    ]
    assert said[0][1].startswith("schedule.max_staleness must be >= 0, got -1 (Delay of the weights edge")
    assert said == [said[0]] * 4


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--seed", "3", RECIPE], "unexpected argument '--seed': did you mean --run.seed?"),
        ([RECIPE, "--schedule.max_staleness"], "override --schedule.max_staleness has no value"),
        (
            ["--schedule.max_staleness", RECIPE],
            f"which recipe? .*; --schedule.max_staleness took {RECIPE} for its value",
        ),
    ],
)
def test_flags_of_train_that_make_no_sense_say_what_would(
    capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    start, _, end = line.partition(".*")
    told = refused(capsys, "train", *words)[-1]
    assert start in told and told.endswith(end)


def test_train_lists_what_is_missing_beside_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model.path", f"{tmp_path}/model", "--run.num_ticks", "0", "--task.reward", f"{tmp_path}/mine.py:score"]
    first, *lines = refused(capsys, "train", RECIPE, *words, "--task.options", "{ min_terms = 9.5 }")
    assert first == "llamarl train: 4 mistakes in the configuration:"
    assert [line.split(" ")[0].rstrip(":") for line in lines] == [
        "run.num_ticks",
        "model.path",
        "task.options",
        "task.reward",
    ]


@pytest.mark.parametrize(("encoding", "errors"), [("ascii", "surrogateescape"), ("utf-8", "strict")])
def test_bytes_that_are_no_text_are_refused_whatever_the_locale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str
) -> None:
    """Lines of the standard input, then a flag, as Python hands them over under C and under a UTF-8 locale."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff b\n"), encoding, errors))
    for flags in ([], ["--prompt", b"a\xff".decode(encoding, "surrogateescape")]):
        (line,) = refused(capsys, "generate", "bundled:tiny", "--max-new-tokens", "1", *flags)
        assert "not UTF-8 text" in line


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("path = bundled:tiny", '; text stands in quotes: path = "bundled:tiny"'),
        ("path = /data/model  # mine", '; text stands in quotes: path = "/data/model"'),
        ("path = 5x", ""),
        ("path", ""),
    ],
)
def test_a_recipe_whose_text_has_no_quotes_is_told_so(
    line: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(f"[model]\n{line}\n")
    assert refused(capsys, "train", str(tmp_path / "r.toml"))[0].partition(")")[2] == advice


def test_a_verb_or_flag_that_is_nearly_one_is_told_which(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian", "tiny"])
    assert ended.value.code == 2 and "no verb 'trian'; did you mean 'train'?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["train", "tiny", "--dry-rum"])
    assert ended.value.code == 2 and "no --dry-rum; did you mean --dry-run?" in capsys.readouterr().err


def test_help_with_a_word_explains_the_keys_that_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> list[str]:
        assert main(list(words)) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]

    section = told("--help", "optimizer")
    assert section[:2] == ["--optimizer.name", "--optimizer.lr"] and len(section) == 11
    assert all(key.startswith("--optimizer.") for key in section)
    assert told("train", "--help", "staleness") == ["--schedule.max_staleness"]
    assert "--generator.sampling.temperature" in told("--help", "temperature")
    assert set(section) < set(told("--help", "keys")) and len(told("--help", "keys")) > 150
    assert told("--help", "zzz") == []


def test_help_of_a_word_that_no_key_holds_names_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "zzz"]) == 0
    assert capsys.readouterr().out.startswith("no key holds 'zzz'; the sections are run (7), model (2), ")


def test_a_bare_command_shows_what_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    first = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in first[:3]] == [
        "llamarl train tiny",
        "llamarl report runs/tiny",
        "llamarl new my-task",
    ]


def test_a_recipe_in_another_format_is_told_what_one_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("optimizer:\n  lr: 1\n")
    (line,) = refused(capsys, "train", f"{tmp_path}/recipe.yaml")
    assert line.endswith("a recipe is TOML, lines of key = value below [section]: llamarl recipes tiny prints one")


def test_a_reward_without_a_function_is_the_only_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    words = ["--task.name", "function", "--task.data", f"{tmp_path}/q.jsonl", "--task.reward", "r.py"]
    assert refused(capsys, "train", RECIPE, *words)[1:] == [
        "task.reward must be module:function or file.py:function, got 'r.py'"
    ]


def test_eval_of_a_model_that_is_no_run_asks_for_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(Path(RECIPE).parents[1] / "src" / "llamarl" / "assets" / "tiny")
    (line,) = refused(capsys, "eval", folder)
    assert "which task?" in line and "--recipe RECIPE" in line


def test_a_task_with_a_test_set_is_asked_whole_unless_prompts_are_counted() -> None:
    def asked(data: str | None, prompts: int | None) -> int | None:
        return eval_verb._num_prompts(argparse.Namespace(data=data, prompts=prompts))

    whole = asked("gsm8k", None)
    assert whole is not None and whole > 100_000
    assert (asked("gsm8k", 5), asked("countdown", None), asked(None, None)) == (5, None, None)


def test_ctrl_c_while_modules_are_imported_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def importing() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("llamarl.cli.main.main", importing)
    monkeypatch.setattr("llamarl.cli.main.end_process", lambda code: None)
    assert (command(), capsys.readouterr().err) == (130, "llamarl: stopped by the user\n")


def test_sigterm_that_a_library_makes_an_error_of_its_own_is_still_the_users(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(args: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
        except KeyboardInterrupt:
            pass
        raise CheckpointError("could not determine the shape of object type 'torch.storage.UntypedStorage'")

    monkeypatch.setattr(recipes, "run", read)
    assert main(["recipes"]) == 130
    assert capsys.readouterr().err == "llamarl recipes: stopped by the user\n"
