"""``llamarl.train`` and what it returns: a run on disk as an object: its metrics and rollouts, its
policy, and going on with it."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from llamarl.config import RunConfig, load_config
from llamarl.errors import ConfigError
from llamarl.import_path import forget_files
from llamarl.reading import user_path

if TYPE_CHECKING:
    from llamarl.api.llm import LLM, Completion
    from llamarl.observability.rollouts import Rollout

__all__ = ["Metrics", "Run", "train"]

_CONFIG_FILE = "config.toml"


class Metrics(dict[str, list[float | None]]):
    """Columns of ``metrics.jsonl``: key -> its value at each tick, None where a tick has none.
    ``pandas.DataFrame(metrics)`` makes a table of it; docs/metric_keys.md says what each key
    means."""

    def __init__(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        self.rows = list(rows)
        """One mapping a tick."""
        keys = dict.fromkeys(key for row in self.rows for key in row)
        super().__init__({key: [row.get(key) for row in self.rows] for key in keys})

    def __missing__(self, key: str) -> list[float | None]:
        raise KeyError(f"no metric {key!r} in this run; there are {', '.join(self)}")

    def __repr__(self) -> str:
        return f"Metrics({len(self.rows)} ticks, {len(self)} keys: {', '.join(list(self)[:6])}, ...)"

    _SHOWN = ("step", "reward/mean", "eval/accuracy", "staleness/mean", "response/length_mean", "time/step_s")

    def _repr_html_(self) -> str:
        """The last ticks, for notebooks."""
        keys = [key for key in self._SHOWN if key in self]
        head = "".join(f"<th>{html.escape(key)}</th>" for key in keys)
        body = "".join(
            "<tr>" + "".join(f"<td>{_shown(row.get(key))}</td>" for key in keys) + "</tr>" for row in self.rows[-10:]
        )
        return f"<p>{html.escape(repr(self))}; the last {min(10, len(self.rows))} ticks:</p><table><tr>{head}</tr>{body}</table>"


class Run:
    """A run that has been made, by ``llamarl.train`` or on the command line.

    Args:
        dir: Its folder.

    Raises:
        ConfigError: It holds no run.
    """

    def __init__(self, dir: str | os.PathLike[str]) -> None:
        self.dir = user_path(dir, "RUN").resolve()
        if not (self.dir / _CONFIG_FILE).is_file():
            raise ConfigError(f"{self.dir} holds no run (no {_CONFIG_FILE}): give the folder of a run")

    @property
    def config(self) -> RunConfig:
        """As it was resolved when the run began."""
        return load_config(self.dir / _CONFIG_FILE)

    @property
    def metrics(self) -> Metrics:
        """What ``metrics.jsonl`` holds now; read anew each time, so it may be asked while the run goes on."""
        from llamarl.observability.metrics import read_metrics

        return Metrics(read_metrics(self.dir))

    @property
    def model(self) -> Path:
        """Hugging Face folder of the final policy; ``adapter`` beside it where the run trained LoRA adapters."""
        return self.dir / ("model" if (self.dir / "model").exists() else "adapter")

    @overload
    def rollouts(self) -> Iterator[Rollout]: ...
    @overload
    def rollouts(self, tick: int) -> list[Rollout]: ...
    def rollouts(self, tick: int | None = None) -> list[Rollout] | Iterator[Rollout]:
        """Every sample of a tick, in order: prompt, response with its tokens and log-probs, reward, advantage.

        An advantage is the one that the trainer used, over a response's tokens the mean; it is None
        where a response has no reward, and where no optimizer step of the tick has taken it.

        Args:
            tick: None: those of all ticks, read one tick after the other as they are asked for.

        Raises:
            DataError: The run wrote none (``observability.rollouts``), or none at this tick.
        """
        from llamarl.observability.rollouts import rollout_ticks

        if tick is not None:
            return list(self._rollouts_of(tick))
        rollout_ticks(self.dir)
        return self._rollouts_of(None)

    def _rollouts_of(self, tick: int | None) -> Iterator[Rollout]:
        from llamarl.observability.rollouts import read_rollouts
        from llamarl.observability.trained_tokens import read_trained_files, trained_files

        trained = trained_files(self.dir)
        for at, samples in groupby(read_rollouts(self.dir, tick), key=lambda sample: sample.tick):
            of_tick = read_trained_files(trained.get(at, ()))
            found = {(one.prompt_index, one.sample_index): one.advantage for one in of_tick}
            for sample in samples:
                place = sample.response.prompt_index, sample.response.sample_index
                yield replace(sample, advantage=found.get(place))

    def generate(
        self, prompts: str | Sequence[Mapping[str, str]] | Sequence[str | Sequence[Mapping[str, str]]], **sampling: Any
    ) -> list[Completion]:
        """Responses of its final policy, with its own engine, precision and sampling; see
        :meth:`llamarl.LLM.generate`."""
        return self.llm.generate(prompts, **sampling)

    @cached_property
    def llm(self) -> LLM:
        """Its final policy, loaded when first used."""
        from llamarl.api.llm import LLM

        return LLM(self.dir)

    def resume(self, **settings: Any) -> Run:
        """Go on from the newest checkpoint, bit for bit, and return the run.

        Args:
            settings: As :func:`llamarl.train` takes them; only what changes no bit, such as a larger ``num_ticks``.

        Raises:
            ConfigError: A setting would change bits.
            LlamaRLError: Whatever ended it again.
        """
        from llamarl.api.settings import dotted
        from llamarl.config import read_settings
        from llamarl.controller.begun import begun_config
        from llamarl.controller.resume import resume_run

        forget_files()
        config = begun_config(self.dir, read_settings(None, dotted(settings)))
        self.__dict__.pop("llm", None)  # its final policy will be another
        resume_run(config)
        return Run(self.dir)

    def __repr__(self) -> str:
        rows = self.metrics.rows if (self.dir / "metrics.jsonl").is_file() else []
        last = rows[-1] if rows else {}
        reward = f", reward {_shown(last['reward/mean'])}" if last.get("reward/mean") is not None else ""
        return f"Run({str(self.dir)!r}, {len(rows)} of {self.config.run.num_ticks} ticks{reward})"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:,d}" if isinstance(value, int) else f"{value:.4g}"


def train(recipe: str | os.PathLike[str] | None = None, **settings: Any) -> Run:
    """Run a job to its end, with the console's live progress, and return it.

        llamarl.train("tiny", num_ticks=20)
        llamarl.train(model="bundled:tiny", task="steps", num_ticks=20, optimizer={"lr": 1e-4})
        llamarl.train(model="path/to/model", data="questions.jsonl", reward=my_reward, **{"schedule.max_staleness": 0})

    Args:
        recipe: A TOML file, or the name of a recipe that ships with llamarl; without one, every key has its default.
        settings: ``model``, ``task`` (a name, or a list of mappings for a mixture), ``reward`` (a
            function or its import path, or a list of them to add up), ``data`` (a JSONL file,
            another table, or a data set of the Hub), ``dir``, ``seed``, ``num_ticks``, ``epochs``, and
            ``cluster`` (as ``--cluster`` takes it); any section of a recipe as a mapping; any key
            by its dotted name. What is said here comes before what the recipe says. Without ``dir``
            a free folder ``runs/NAME``, ``runs/NAME-2``, ... is taken.

    Raises:
        ConfigError: Something cannot run; every mistake is named, and nothing has been started.
        LlamaRLError: Whatever ended the run. What it saved stays, and ``llamarl.Run(dir).resume()`` goes on from there.
        KeyboardInterrupt: The user stopped it; the same holds.
    """
    from llamarl.api.settings import run_config
    from llamarl.controller.prepare import start_fork_servers
    from llamarl.runtime.fork_server import end_unused_servers

    forget_files()
    config = run_config(recipe, settings)
    start_fork_servers(config)
    try:
        from llamarl.controller.run import start_run

        start_run(config)
    finally:
        end_unused_servers()
    return Run(config.run.dir)
