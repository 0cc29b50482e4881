"""What a person checks before a run: model, data, batch, rate and memory, a line each. For the
console's head, ``RUN/job.json`` and ``--dry-run``."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.config import RunConfig
from llamarl.models.folders import resolve_model_path
from llamarl.plural import format_bytes, plural
from llamarl.weight_sync.model_layouts import model_parameters

__all__ = ["Questions", "overview"]

_STATE_BYTES = 16
"""A trained parameter: float32 weight, gradient and two moments."""
_SHOWN = 240
"""Characters of a prompt."""


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
    parameters = model_parameters(resolve_model_path(local.model.path), dtype="float32").num_elements
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
    noun = "row" if config.algorithm.imitates else "question"
    if questions.num_training is None:
        return f"{noun}s without end"
    passes = config.run.num_ticks * config.groups_per_tick / max(1, questions.num_training)
    held_out = f"{questions.num_held_out:,} held out" if questions.num_held_out else "none held out"
    return f"{plural(questions.num_training, noun)}, seen {_times(passes)} in this run; {held_out}"


def _times(count: float) -> str:
    return f"{count:,.0f} times" if count >= 10 else f"{count:.2g} times"


def _prompt(questions: Questions) -> str:
    shown = questions.first_prompt
    shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN // 2]} … {shown[-_SHOWN // 2 :]}"
    return f"{plural(questions.first_tokens, 'token')}: {shown!r}"


def _batch(config: RunConfig) -> str:
    prompts, steps = config.schedule.prompts_per_step, config.trainer.minibatches * config.trainer.epochs
    updates = f"{plural(steps, 'optimizer step')} a tick"
    if config.algorithm.imitates:
        return f"{plural(prompts, 'row')}, {updates}"
    size, limit = config.generator.group_size, config.generator.sampling.max_new_tokens
    return f"{plural(prompts, 'prompt')} x {plural(size, 'response')} of at most {plural(limit, 'token')}, {updates}"


def _learning_rate(config: RunConfig) -> str:
    optimizer, num_ticks = config.optimizer, config.run.num_ticks
    fall = ""
    if optimizer.schedule != "constant":
        lowest = optimizer.lr * optimizer.min_lr_ratio
        fall = f" to {lowest:.3g} at tick {optimizer.decay_ticks or num_ticks}"
    rise = f", after {plural(optimizer.warmup_ticks, 'tick')} of warm-up" if optimizer.warmup_ticks else ""
    return f"{optimizer.lr:g}, {optimizer.schedule}{fall}{rise}"


def _algorithm(config: RunConfig) -> str:
    algorithm = config.algorithm
    if algorithm.imitates:
        return "sft: cross-entropy on the rows' completions"
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
    ranks = trainer.fsdp * trainer.tp * trainer.pp
    state = 4 * parameters if config.lora.rank else _STATE_BYTES * parameters
    of_trainer = f"trainer {format_bytes(state / ranks)} of weights, gradients and moments a rank, and activations"
    if config.lora.rank:
        of_trainer = f"trainer {format_bytes(state / ranks)} of frozen weights a rank, adapters and activations"
    if config.algorithm.imitates:
        return of_trainer
    width = 4 if generator.engine.dtype == "float32" else 2
    weights, cache = width * parameters / (generator.tp * generator.pp), generator.engine.kv_cache_bytes
    return f"{of_trainer}; generator {format_bytes(weights)} of weights and at most {format_bytes(cache)} of KV cache a rank"
