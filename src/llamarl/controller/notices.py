"""What a user is told before and after: model, data, batch, rate and memory (the console's head,
``RUN/job.json`` and ``--dry-run``), what checkpoints will take, what is saved, what is done again,
how to go on, and which generator replicas are of which kind."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamarl.config import RunConfig
from llamarl.plural import format_bytes, plural
from llamarl.roles import present_roles
from llamarl.settings.engine import CPU_CACHE_BYTES
from llamarl.settings.trainer import TWO_MOMENTS

__all__ = [
    "Questions",
    "checkpoint_bytes",
    "checkpoint_plan",
    "done_again",
    "left_behind",
    "overview",
    "reached_policy",
    "replica_line",
    "resume_command",
    "what_is_saved",
]

_MASTER_AND_MOMENTS = 4 + TWO_MOMENTS
"""Bytes a trained parameter: float32 weight and two moments."""
_SHOWN = 240
"""Characters of a prompt."""


def checkpoint_bytes(config: RunConfig) -> float:
    """Disk that one checkpoint takes, without unfinished responses."""
    from llamarl.models.loading import parameter_shapes  # which imports torch

    parameters = parameter_shapes(config.model.path)
    whole = trained = float(_count(parameters))
    if config.lora.rank:
        trained = float(config.lora.num_parameters(parameters))
    handed_over = trained if config.lora.rank and config.lora.hand_over == "adapter" else whole
    moved = [math.prod(shape) for name, shape in parameters.items() if config.optimizer.is_matrix(name, len(shape))]
    matrices = trained if config.lora.rank else float(sum(moved))
    total = _MASTER_AND_MOMENTS * trained - (TWO_MOMENTS - config.optimizer.moment_bytes) * matrices
    total += 4 * config.schedule.max_staleness * handed_over  # float32 whatever it is computed in
    for role in present_roles(config):
        if role.model is not None and role.model.trained and role.name != "trainer":
            total += _MASTER_AND_MOMENTS * _count(parameter_shapes(role.model.path(config)))
    return total


def _count(parameters: Mapping[str, Sequence[int]]) -> int:
    return sum(map(math.prod, parameters.values()))


def checkpoint_plan(config: RunConfig, num_bytes: float, *, num_held: int = 0, free_bytes: float = math.inf) -> str:
    """When checkpoints are taken and what disk they need, in one line.

    Args:
        num_bytes: That one takes.
        num_held: That are there already.
        free_bytes: On the disk of the run's folder.
    """
    checkpoint = config.checkpoint
    moments = []
    if checkpoint.every_minutes:
        moments.append(f"every {checkpoint.every_minutes:g} min")
    if checkpoint.every:
        moments.append(f"every {checkpoint.every} ticks" if checkpoint.every > 1 else "every tick")
    moments.append("at the end")
    size = f"about {format_bytes(num_bytes)} each"
    # An old one goes when a newer one is there.
    wanted = max(1, checkpoint.keep + 1 - num_held) if checkpoint.keep else 1
    short = f"; the disk has only {format_bytes(free_bytes)} left" if free_bytes < wanted * num_bytes else ""
    if checkpoint.keep == 0:
        return f"{', '.join(moments)}; all are kept, {size}{short}"
    most = format_bytes((checkpoint.keep + 1) * num_bytes)
    return f"{', '.join(moments)}; the newest {checkpoint.keep} are kept, {size}, at most {most} of disk{short}"


def left_behind(path: Path, finished: Sequence[Path]) -> str:
    """Of a folder that a killed run had left among its checkpoints, and that is tidied up.

    Args:
        finished: Those that are complete, oldest first.
    """
    if path.suffix != ".partial":
        return f"{path} was left by a run that was killed: tidied up"
    newest = f"the newest complete one is {finished[-1].name}" if finished else "none is complete"
    return f"{path.with_suffix('')} was not finished when the run ended, and is left out; {newest}"


def resume_command(run_dir: Path) -> str:
    """What goes on with a run, for a shell."""
    return shlex.join(["llamarl", "train", "--resume", str(run_dir)])


def reached_policy(run_dir: Path) -> str:
    """What a new run sets to begin with the policy of a run that has a checkpoint. Only its end
    writes ``RUN/model``."""
    if (run_dir / "model" / "config.json").is_file():
        return f"model.path = {run_dir / 'model'}"
    return f"model.path = DIR (first: {shlex.join(['llamarl', 'export', str(run_dir), '--out', 'DIR'])})"


def what_is_saved(run_dir: Path, last: Path | None, num_rows: int, num_ticks: int, *, journaled: bool = False) -> str:
    """Of a run that has ended early: what its last checkpoint holds, and the command that goes on.

    Args:
        last: The newest finished checkpoint, ``tick_<n>``; None if there is none.
        num_rows: Ticks that are done, by the metrics.
        journaled: Whether the journal holds those since.
    """
    if last is None:
        nothing = f"nothing holds {plural(num_rows, 'tick')} that are done" if num_rows else "nothing holds anything"
        held = _in_journal(plural(num_rows, "tick")) if journaled and num_rows else f"so {nothing}; again from tick 0"
        return f"no checkpoint of this run was finished, {held}: {resume_command(run_dir)}"
    saved = int(last.name.removeprefix("tick_")) + 1
    beyond = ""
    if again := max(0, num_rows - saved):
        ticks = f"{plural(again, 'tick')} beyond"
        beyond = f"; {_in_journal(ticks) if journaled else f'{ticks} will be done again'}"
    where = f"{saved} of {plural(num_ticks, 'tick')} (0 to {saved - 1}), in {last}{beyond}"
    return f"saved: {where}\nto go on: {resume_command(run_dir)}"


def _in_journal(ticks: str) -> str:
    return f"the journal holds the samples and rewards of {ticks}"


def done_again(run_dir: Path, first_tick: int, num_rows: int, *, latest: bool) -> str:
    """Of a run that is gone on with: what it had done beyond its checkpoint; empty if nothing.

    Args:
        first_tick: Where it goes on; 0 if it has no checkpoint.
        num_rows: Ticks that were done, by the metrics.
        latest: Its decisions depend on timing.
    """
    again = max(0, num_rows - first_tick)
    if first_tick:
        head, which = f"{run_dir} goes on at tick {first_tick}", f"{plural(again, 'tick')} beyond"
    else:
        head, which = f"{run_dir} has no checkpoint: it begins again at tick 0", f"all of its {plural(again, 'tick')}"
    if not again:
        return head
    kind = "other ones, as schedule.weights is 'latest'" if latest else "the same ones"
    return (
        f"{head}; {which} {'are' if again > 1 else 'is'} done again: their rows, rollouts and trace give way to {kind}"
    )


def replica_line(config: RunConfig) -> str:
    """What each kind of ``generator.replicas`` is; empty where all are alike."""
    kinds = config.generator.replicas
    each = [
        f"{kind.dp} x tp {kind.tp or config.generator.tp} {_precision(config, place)}, "
        f"{plural(1, 'prompt') if (prompts := _prompts(config, place)) == '1' else f'{prompts} prompts'} a tick"
        for place, kind in enumerate(kinds)
    ]
    return "; ".join(each)


def _precision(config: RunConfig, kind: int) -> str:
    own = config.generator.as_of_kind(kind)
    return own.engine.dtype if own.quantization == "none" else f"{own.engine.dtype} {own.quantization}"


def _prompts(config: RunConfig, kind: int) -> str:
    """``4``, or ``3.75 (3 or 4)`` where the share makes no whole number."""
    first = sum(one.dp for one in config.generator.replicas[:kind])
    quota = config.dealing.quotas[first]
    return f"{quota:g}" if quota == int(quota) else f"{quota:.3g} ({int(quota)} or {int(quota) + 1})"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """What the checks have found of a run's data."""

    num_training: int | None
    """None: the task makes its questions, without end."""
    num_held_out: int | None
    first_prompt: str
    """As its tokens spell it, template and special tokens included."""
    first_tokens: int

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.num_held_out != 0


def overview(config: RunConfig, local: RunConfig, questions: Questions) -> dict[str, str]:
    """Label -> text, in the order in which it is shown.

    Args:
        config: As it is written down: models of the Hub by their ids.
        local: The same with models by folders.
    """
    from llamarl.models.precision import num_parameters

    parameters = num_parameters(local.model.path)
    return {
        "model": f"{config.model.path}, {_millions(parameters)} parameters, trained in {config.trainer.dtype}",
        "task": f"{config.task.titles}, {_data(config, questions)}",
        "first prompt": _prompt(questions),
        "batch": _batch(config),
        "learning rate": _learning_rate(config),
        "algorithm": _algorithm(config),
        **({"evaluation": _evaluation(config, questions)} if config.evaluation.every else {}),
        "memory": _memory(config, parameters),
    }


def _millions(count: float) -> str:
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _data(config: RunConfig, questions: Questions) -> str:
    noun = "question" if config.samples else "row" if config.algorithm.imitates else "recorded group"
    if questions.num_training is None:
        return f"{noun}s without end"
    passes = config.run.num_ticks * config.groups_per_tick / max(1, questions.num_training)
    held_out = f"{questions.num_held_out:,} held out" if questions.num_held_out else "none held out"
    return f"{plural(questions.num_training, noun)}, seen {_times(passes)} in this run; {held_out}"


def _times(count: float) -> str:
    shown = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
    return f"{shown} time{'' if shown == '1' else 's'}"


def _prompt(questions: Questions) -> str:
    shown = questions.first_prompt
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN // 2]} … {shown[-_SHOWN // 2 :]}"
    return f"{plural(questions.first_tokens, 'token')}: {shown!r}"


def _batch(config: RunConfig) -> str:
    prompts, steps = config.schedule.prompts_per_step, config.trainer.minibatches * config.trainer.epochs
    updates = f"{plural(steps, 'optimizer step')} a tick"
    if not config.samples:
        return f"{plural(prompts, 'row' if config.algorithm.imitates else 'recorded group')}, {updates}"
    size, limit = config.generator.group_size, config.generator.sampling.max_new_tokens
    return f"{plural(prompts, 'prompt')} x {plural(size, 'response')} of at most {plural(limit, 'token')}, {updates}"


def _learning_rate(config: RunConfig) -> str:
    optimizer, num_ticks = config.optimizer, config.run.num_ticks
    fall, end = "", optimizer.decay_ticks or num_ticks
    if optimizer.schedule != "constant" and optimizer.warmup_ticks < end:
        fall = f" to {optimizer.lr * optimizer.min_lr_ratio:.3g} at tick {end}"
    rise = f", after {plural(optimizer.warmup_ticks, 'tick')} of warm-up" if optimizer.warmup_ticks else ""
    return f"{optimizer.lr:g}, {optimizer.schedule}{fall}{rise}"


def _algorithm(config: RunConfig) -> str:
    algorithm = config.algorithm
    if algorithm.imitates:
        return "sft: cross-entropy on the rows' completions"
    if algorithm.distills:
        teacher = config.reference.path or "the policy itself"
        teacher += ", shown the answers" if config.reference.template else ""
        if algorithm.teacher_top_k:
            return f"KL over the {algorithm.teacher_top_k} likeliest tokens of the teacher {teacher}"
        return f"{algorithm.name}, advantage distillation from {teacher}"
    kl = "no KL term"
    if algorithm.kl_coef:
        reference = config.reference.path or config.model.path
        kl = (
            f"KL term kl_coef {algorithm.kl_coef:g} ({algorithm.kl_estimator}) against {reference} as a reference model"
        )
    return f"{algorithm.name}, advantage {algorithm.advantage}, {kl}"


def _evaluation(config: RunConfig, questions: Questions) -> str:
    evaluation = config.evaluation
    prompts = min(evaluation.num_prompts, questions.num_held_out or evaluation.num_prompts)
    if config.algorithm.imitates:
        fall = f"; the run ends where the loss has not fallen for {evaluation.patience}" if evaluation.patience else ""
        return f"every {plural(evaluation.every, 'tick')}: {plural(prompts, 'held-out row')}{fall}"
    responses = prompts * evaluation.samples_per_prompt
    share = responses / (config.schedule.prompts_per_step * config.generator.group_size)
    return (
        f"every {plural(evaluation.every, 'tick')}, and before the first: {plural(prompts, 'held-out prompt')} x "
        f"{plural(evaluation.samples_per_prompt, 'response')}, {_times(share)} what a tick samples"
    )


def _memory(config: RunConfig, parameters: float) -> str:
    trainer, generator = config.trainer, config.generator
    ranks, frozen = trainer.num_ranks, 2 if trainer.dtype == "bfloat16" else 4
    state = frozen * parameters if config.lora.rank else (8 + config.optimizer.moment_bytes) * parameters
    of_trainer = f"trainer {format_bytes(state / ranks)} of weights, gradients and moments a rank, and activations"
    if config.lora.rank:
        of_trainer = f"trainer {format_bytes(state / ranks)} of frozen weights a rank, adapters and activations"
    if not config.samples:
        return of_trainer
    width = 2 if generator.engine.dtype in ("bfloat16", "float16") else 4
    weights, cache = width * parameters / generator.tp, generator.engine.kv_cache_bytes or CPU_CACHE_BYTES
    return f"{of_trainer}; generator {format_bytes(weights)} of weights and at most {format_bytes(cache)} of KV cache a rank"
