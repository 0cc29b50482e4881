"""The verbs as a user types them, and the examples as they ship."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, CommandLine, rows
from forked_command import Started, as_python


@pytest.fixture(scope="module")
def finished(llamarl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    llamarl.train(run_dir, {"run.num_ticks": 2, "run.runtime": '"inline"'})
    return run_dir


def test_a_run_leaves_what_the_readme_names(finished: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "rollouts", "trace.json", "tensorboard", "checkpoints", "model"):
        assert (finished / name).exists(), name
    assert isinstance(json.loads((finished / "trace.json").read_text()), (list, dict))
    wanted = """step policy_version reward/mean reward/failed staleness/mean staleness/max response/length_mean
        tokens/generated tokens/trained time/step_s time/generator_s time/trainer_s time/weight_sync_s idle/generator
        idle/trainer ratio/mean ratio/clipped_fraction mismatch/kl loss/policy grad_norm""".split()
    for row in rows(finished):
        assert set(wanted) <= set(row)
    assert "eval/accuracy" in rows(finished)[0]


def test_eval_reports_greedy_sampled_and_majority_with_intervals(llamarl: CommandLine, finished: Path) -> None:
    done = llamarl.run(["eval", str(finished), "--prompts", "12", "--n", "4", "--greedy", "--json"])
    scores = json.loads(done.stdout)
    named = ["greedy_pass@1", "pass@1", "pass@2", "pass@4", "majority@4"]
    assert set(named) == scores["intervals"].keys() < scores.keys() | {"intervals"}
    for name in named:
        low, high = scores["intervals"][name]
        assert 0 <= low <= scores[name] <= high <= 1
    assert (
        scores["pass@1"] == pytest.approx(scores["accuracy"])
        and scores["pass@1"] <= scores["pass@2"] <= scores["pass@4"]
    )


def test_eval_of_a_task_by_name_writes_each_response(llamarl: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["--data", "steps", "--prompts", "3", "--n", "2", "--greedy", "--responses", str(out)]
    done = llamarl.run(["eval", "bundled:tiny", *words, "--generator.sampling.max_new_tokens", "8"])
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert (lines["task"], lines["prompts"], lines["samples"]) == ("steps", "3", "6")
    assert lines["pass@2"].count("[") == 1
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("greedy", False) for line in written] == [False] * 6 + [True] * 3
    cut = [line["finish_reason"] == "length" for line in written]
    assert float(lines["truncated_fraction"]) == pytest.approx(sum(cut[:6]) / 6, abs=1e-4)
    told = f"{sum(cut) / 9:.1%} of the responses were cut by generator.sampling.max_new_tokens = 8 and judged as they stand"
    assert any(cut) and told in done.stderr


def test_generate_repeats_with_one_seed_and_carries_jsonl_keys_over(llamarl: CommandLine, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a3 b9 c4 =\\n", "id": 7}\n{"prompt": "a1 b2 =\\n", "id": 8}\n')
    answers = []
    for name in ("one", "two"):
        out = tmp_path / f"{name}.jsonl"
        llamarl.run(["generate", "bundled:tiny", "--input", str(prompts), "--output", str(out), "--seed", "5"])
        answers.append([json.loads(line) for line in out.read_text().splitlines()])
    assert answers[0] == answers[1]
    assert [a["id"] for a in answers[0]] == [7, 8]
    assert all(len(a["tokens"]) == len(a["logprobs"]) > 0 for a in answers[0])


def test_plain_answers_come_in_the_order_of_the_prompts_under_their_numbers_and_greedy_ones_are_equal(
    llamarl: CommandLine,
) -> None:
    prompts = "a3 b9 c4 =\n" * 3 + "a1 b2 =\n"
    done = llamarl.run(["generate", "bundled:tiny", "--samples", "2", "--temperature", "0"], stdin=prompts)
    labels = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert labels == [f"[prompt {p}, sample {s}]" for p in (1, 2, 3, 4) for s in (1, 2)]
    answers = re.split(r"\[prompt \d, sample \d\]\n", done.stdout)[1:]
    assert answers[0] == answers[1] and answers[6] == answers[7] and answers[0] != answers[6]


def test_the_example_graph_runs_and_shows_its_delay() -> None:
    script = REPOSITORY / "examples" / "own_graph.py"
    done = Started([str(script), "inline"], program=as_python)
    assert done.wait(120) == 0, done.err
    totals = [line for line in done.out.splitlines() if "collector" in line and "total" in line]
    assert [line.split("'total': ")[1] for line in totals] == ["6.0}", "66.0}", "126.0}", "186.0}", "246.0}"]
    fed_back = [line for line in done.out.splitlines() if "source" in line and "'feedback'" in line]
    assert [line.split("'feedback': ")[1] for line in fed_back] == ["0.0}", "0.0}", "6.0}", "66.0}", "126.0}"]


def test_an_answers_file_survives_a_bad_prompt_and_is_never_the_prompts_file(
    llamarl: CommandLine, tmp_path: Path
) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "a1 " * 2000}) + "\n")
    out.write_text("earlier answers\n")
    done = llamarl.run(["generate", "bundled:tiny", "--input", str(prompts), "--output", str(out)], status=2)
    assert "in.jsonl:1" in done.stderr and "context" in done.stderr
    assert out.read_text() == "earlier answers\n"
    prompts.write_text('{"prompt": "a1 b2 =\\n"}\n')
    done = llamarl.run(["generate", "bundled:tiny", "--input", str(prompts), "--output", str(prompts)], status=2)
    assert "is the file of --input" in done.stderr
    assert prompts.read_text() == '{"prompt": "a1 b2 =\\n"}\n'
    done = llamarl.run(["generate", "bundled:tiny", "--input", str(prompts), "--output", str(out)])
    assert len(out.read_text().splitlines()) == 1


def test_an_answer_that_failed_says_so_and_ends_with_status_1(llamarl: CommandLine, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from llamarl.models.folders import resolve_model_path

    shutil.copytree(resolve_model_path("bundled:tiny"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    done = llamarl.run(["generate", str(tmp_path / "model"), "--prompt", "a1 b2 =\n"], status=1)
    assert "--prompt: no answer: logits are not finite" in done.stderr


def test_the_package_runs_as_the_command_does() -> None:
    said = [
        subprocess.run([sys.executable, "-m", name, "--help"], capture_output=True, text=True, check=True).stdout
        for name in ("llamarl", "llamarl.cli.main")
    ]
    assert said[0] == said[1] and "train" in said[0]


def test_eval_names_the_causes_of_samples_that_failed(llamarl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("prompt,answer\n1+1=,2\n2+2=,4\n3+3=,6\n")
    (tmp_path / "r.py").write_text("def r(response, answer):\n    return float(answer) / (len(response) * 0)\n")
    words = ["--task.data", str(tmp_path / "q.csv"), "--task.reward", f"{tmp_path / 'r.py'}:r", "--n", "2"]
    done = llamarl.run(["eval", "bundled:tiny", *words, "--generator.sampling.max_new_tokens", "4"], status=1)
    assert "failed, so in no figure: 2 x exception: ZeroDivisionError" in done.stderr and "r.py:2" in done.stderr
