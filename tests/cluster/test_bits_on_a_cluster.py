"""The same recipe and the same bits on a Ray cluster whose nodes share nothing (``make test-cluster``)."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosted_jobs import ON_A_CLUSTER, SMALL, run_dir_of, train, wait_for_none_left
from ray_hosts import RayHosts, ray_hosts
from same_run import assert_same_run

import llamarl.assets

pytestmark = ON_A_CLUSTER
TINY = ("tiny", *SMALL, "--run.num_ticks", "14", "--checkpoint.every", "5")
PLACEMENTS = (
    ("--on", "generator=n0", "--on", "reward=n0", "--on", "trainer=n1", "--on", "evaluator=n1"),
    ("--on", "generator=n1", "--on", "reward=n2", "--on", "trainer=n0", "--on", "evaluator=n2"),
    ("--on", "generator=1", "--on", "reward=1", "--on", "trainer=2", "--on", "evaluator=10.85.0.3"),
)
EPISODES = (
    *("--task.name", "episodes", "--task.environment_options", "{ turns = 5, fewest = 1 }"),
    *("--task.environment", f"{Path(__file__).parents[1] / 'small_environments.py'}:Ledgers"),
    *("--task.max_turn_tokens", "24", "--generator.max_segments", "2", "--generator.oversubscription", "1.5"),
)

CURRICULUM = (
    *("--task.name", "function", "--task.data", "{folder}/rows.jsonl", "--task.columns", '{ answer = "completion" }'),
    *("--task.reward", "{folder}/judge.py:score", "--task.eval_fraction", "0", "--evaluation.every", "0"),
    *("--data.candidates", "3"),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    with ray_hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def one_machine(folder: Path) -> Path:
    train(None, folder / "one", *TINY)
    return folder / "one"


@pytest.mark.parametrize("number", range(len(PLACEMENTS)))
def test_fourteen_ticks_give_the_bits_of_one_machine_wherever_ranks_are(
    cluster: RayHosts, one_machine: Path, number: int
) -> None:
    done = train(cluster, f"placed{number}", *TINY, *PLACEMENTS[number])
    assert "it has no folder" in done.stdout, done.stdout
    assert done.stderr == ""
    assert_same_run(one_machine, run_dir_of(cluster, f"placed{number}"))
    wait_for_none_left(cluster.hosts)


def both(cluster: RayHosts, folder: Path, name: str, words: tuple[str, ...], *on: str) -> None:
    """One recipe on one machine and on the cluster; ``{folder}`` in a word is where a file lies, on the first node alone."""
    train(None, folder / name, *(word.replace("{folder}", str(folder)) for word in words))
    train(cluster, name, *(word.replace("{folder}", "/tmp") for word in words), *on)
    assert_same_run(folder / name, run_dir_of(cluster, name))
    wait_for_none_left(cluster.hosts)


def test_a_trainer_of_two_by_two_ranks_over_two_nodes_at_staleness_two_gives_the_bits_of_one_machine(
    cluster: RayHosts, folder: Path
) -> None:
    sizes = ("--trainer.fsdp", "2", "--trainer.tp", "2", "--schedule.max_staleness", "2")
    both(cluster, folder, "mesh", ("tiny", *SMALL, *sizes), "--on", "trainer=n0,n1", "--on", "generator=n2")


def test_two_generators_on_two_nodes_give_the_bits_of_one_machine(cluster: RayHosts, folder: Path) -> None:
    both(cluster, folder, "two", ("tiny", *SMALL, "--generator.dp", "2"), "--on", "generator=n0,n1")


def test_a_reward_model_on_another_node_gives_the_bits_of_one_machine(cluster: RayHosts, folder: Path) -> None:
    repository = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(repository / "examples" / "reward_model"))
    from train_classifier import train_classifier

    train_classifier(folder / "classifier", steps=20)
    recipe = repository / "examples" / "reward_model" / "reward_model.toml"
    shutil.copytree(folder / "classifier", run_dir_of(cluster, "classifier"))
    words = (str(recipe), *SMALL, "--reward_model.path", "{folder}/classifier")
    both(cluster, folder, "judged", words, "--on", "reward_model=n1", "--on", "trainer=n2")


@pytest.mark.parametrize(
    ("name", "words", "on"),
    [
        ("sft", ("--algorithm.name", "sft", "--task.name", "demonstrations", "--task.data", "{folder}/rows.jsonl"), ""),
        ("offline", ("--task.rollouts", "{folder}/recorded", "--schedule.max_staleness", "0"), ""),
        (
            "distilled",
            ("--algorithm.advantage", "distillation", "--reference.path", "{folder}/teacher"),
            "reference=n1",
        ),
        ("curriculum", CURRICULUM, "generator=n1"),
    ],
)
def test_what_trains_on_other_than_rewards_gives_the_bits_of_one_machine(
    name: str, words: tuple[str, ...], on: str, cluster: RayHosts, folder: Path, one_machine: Path
) -> None:
    (folder / "judge.py").write_text("def score(response, answer):\n    return float(answer in response)\n")
    sources = {
        "judge.py:score": folder / "judge.py",
        "rows.jsonl": Path(__file__).resolve().parents[2] / "examples" / "executors" / "rows.jsonl",
        "recorded": one_machine / "rollouts",
        "teacher": one_machine / "model",
    }
    for called, source in sources.items():
        if any(word.endswith(called) for word in words):
            for place in (folder / called, run_dir_of(cluster, called)):
                place = place.with_name(place.name.partition(":")[0])
                if not place.exists():
                    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, place)
    both(cluster, folder, name, ("tiny", *SMALL, *words), *(("--on", on) if on else ()), "--on", "trainer=n2")


def test_episodes_on_another_node_give_the_bits_of_one_machine(cluster: RayHosts, folder: Path) -> None:
    both(cluster, folder, "episodes", ("tiny", *SMALL, *EPISODES), "--on", "generator=n1", "--on", "trainer=n2")


def test_an_adapter_on_a_model_that_the_nodes_lack_is_that_of_one_machine(cluster: RayHosts, folder: Path) -> None:
    model = folder / "base"
    shutil.copytree(Path(llamarl.assets.__file__).parent / "tiny", model)
    inside = run_dir_of(cluster, "base")
    shutil.copytree(model, inside)
    words = ("tiny", *SMALL, "--lora.rank", "4", "--run.num_ticks", "2")
    train(None, folder / "lora", *words, "--model.path", str(model))
    train(cluster, "lora", *words, "--model.path", "/tmp/base", "--on", "trainer=n1", "--on", "generator=n2")
    for name in ("adapter_model.safetensors",):
        assert (folder / "lora" / "adapter" / name).read_bytes() == (
            run_dir_of(cluster, "lora") / "adapter" / name
        ).read_bytes()
    config = json.loads((run_dir_of(cluster, "lora") / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "/tmp/base"
