"""``llamarl.LLM``: sampling from a model with the engine that runs use."""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from llamarl.config import Check, DataConfig, RunConfig, load_config, read_settings
from llamarl.errors import ConfigError, DataError
from llamarl.progress import forget, watch
from llamarl.strict import list_mistakes, mistakes_of

if TYPE_CHECKING:
    from llamarl.engine.sequence import Sequence as TokenSequence
    from llamarl.models.exported import NamedModel

__all__ = ["LLM", "Completion", "open_policy"]

Messages = Sequence[Mapping[str, str]]
"""A conversation: objects with ``role`` and ``content``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One response to one prompt."""

    prompt: str | tuple[Mapping[str, str], ...]
    sample: int
    """0 .. samples - 1."""
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token, nats, under the distribution sampled from."""
    finish_reason: str
    """"stop", "length", or "error"; then ``error`` says why."""
    error: str | None = None


def open_policy(
    name: str | NamedModel,
    *,
    base: str | None = None,
    recipe: str | None = None,
    words: Sequence[str] = (),
    settings: Mapping[str, tuple[str, Any]] | None = None,
    checks: Sequence[Check] = (),
    section: str = "generator",
) -> tuple[NamedModel, RunConfig]:
    """Find a model by its name, with the settings under which it is served; loads no weights.

    A run brings its own settings, which ``words`` and then ``settings`` change.

    Args:
        name: Run folder, Hugging Face folder, adapter folder, id of the Hub, or ``bundled:tiny``; or what was found by it.
        base: Base model of an adapter; None: the one that it names.
        recipe: In place of the run's own.
        words: ``--section.key VALUE``, as typed.
        settings: Key -> the caller's name for it, by which its mistakes are told, and its value;
            None leaves it as it is.
        checks: As in ``config.validate``.
        section: That on whose device the engine will be.

    Returns:
        The model, and a configuration whose ``model.path`` is a folder here.

    Raises:
        ConfigError, ModelError: With every mistake in the caller's names.
    """
    from llamarl.controller.begun import refuse_code_of_a_run
    from llamarl.controller.preflight import check_engine
    from llamarl.models.exported import find_model
    from llamarl.models.folders import local_model_path

    named = find_model(name, base) if isinstance(name, str) else name
    given = {"model.path": ("model", named.path), **(settings or {})}
    changes = [f"--{key}={_toml(value)}" for key, (_, value) in given.items() if value is not None]
    try:
        if recipe is None and named.recipe is not None:
            words_given = [*words, *changes]
            refuse_code_of_a_run(
                load_config(named.recipe, words_given),
                Path(named.recipe).parent,
                read_settings(None, words_given),
                sections=("model", "generator", "task") if section == "evaluation" else ("model", "generator"),
            )
        config = load_config(recipe or named.recipe, [*words, *changes], checks)
        check_engine(config, sections=[section])
    except ConfigError as error:
        names = {key: name for key, (name, value) in given.items() if value is not None}
        found = [dataclasses.replace(one, key=names.get(one.key, one.key)) for one in error.mistakes]
        raise ConfigError(str(found[0]) if len(found) == 1 else list_mistakes(found), mistakes=found) from error
    model = config.model
    path = local_model_path(model.path, key="model", code=model.trust_remote_code)
    return named, dataclasses.replace(config, model=dataclasses.replace(model, path=path))


def _toml(value: Any) -> str:
    if isinstance(value, float):  # nan, inf
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=lambda one: str(one).removeprefix("torch."))


def _with_room(config: RunConfig, tokens: int) -> RunConfig:
    """Leave one sequence of ``tokens`` its room in the KV cache of a CPU, up to a quarter of the memory; it is taken as
    it is used. Of other engines, which may know models of another make, nothing is changed."""
    from llamarl.models.loading import cache_shape, load_model_config
    from llamarl.runtime.placement import available_memory
    from llamarl.settings.engine import CPU_CACHE_BYTES

    engine = config.generator.engine
    if not engine.kind.native or engine.kv_cache_bytes:
        return config
    of_a_token = 2 * 4 * math.prod(cache_shape(load_model_config(config.model.path)))  # keys and values, in float32
    longest = of_a_token * (tokens + 2 * engine.block_size_on("cpu"))
    cache = max(CPU_CACHE_BYTES, min(longest, int(available_memory() / 4)))
    engine = dataclasses.replace(engine, kv_cache_bytes=cache)
    return dataclasses.replace(config, generator=dataclasses.replace(config.generator, engine=engine))


class LLM:
    """A model, ready to sample from.

        llm = llamarl.LLM("bundled:tiny")
        llm.generate(["a3 b9 =\\n"], max_new_tokens=20)[0].text

    Args:
        path: Hugging Face folder, run folder (its policy and settings), LoRA adapter folder, the id of a model of the
            Hugging Face Hub (``org/name`` or ``org/name@REVISION``), or ``bundled:tiny``.
        base: Base model of an adapter; None: the one that it names.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is one; torch's own too.
        dtype: To compute in, such as ``bfloat16`` or ``torch.bfloat16``; None: the run's, else float32
            on a CPU and ``auto`` on CUDA.
        quantization: ``none``, ``int8`` (CPU) or ``fp8`` (CUDA); None: the run's, else none.
        trust_remote_code: Whether the folder's tokenizer may be code of its own.

    Raises:
        ModelError: No such model, or one that is not supported.
        ConfigError: This engine cannot run so here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        base: str | None = None,
        device: str = "auto",
        dtype: str | None = None,
        quantization: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        settings = {
            "generator.engine.dtype": ("dtype", dtype),
            "generator.quantization": ("quantization", quantization),
            "generator.device": ("device", device),
            "model.trust_remote_code": ("trust_remote_code", trust_remote_code or None),
        }
        self._load(*open_policy(os.fspath(path), base=base, settings=settings))

    @classmethod
    def of(cls, named: NamedModel, config: RunConfig) -> LLM:
        """Load what :func:`open_policy` found."""
        llm = cls.__new__(cls)
        llm._load(named, config)
        return llm

    def _load(self, named: NamedModel, config: RunConfig) -> None:
        from llamarl.engine.factory import make_engine, resolve_device
        from llamarl.executors.self_check import check_generated
        from llamarl.executors.version_loader import load_adapter
        from llamarl.models.loading import context_length, load_tokenizer

        self.config, model = config, config.model
        check_generated(config)
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.context_length = context_length(model.path) or 1 << 20
        """Tokens that prompt and response may have together."""
        self._of_a_run = named.run is not None
        self._one_call = threading.Lock()
        device = resolve_device(config.generator.device)
        if device == "cpu":
            config = _with_room(config, self.context_length)
        self._engine = make_engine(config, self.tokenizer, device=device)
        if named.adapter is not None:
            load_adapter(self._engine, named.adapter, model_path=model.path)

    def generate(
        self,
        prompts: str | Messages | Sequence[str | Messages],
        *,
        samples: int = 1,
        seed: int = 0,
        chat_template: bool = True,
        **sampling: Any,
    ) -> list[Completion]:
        """Sample responses to all prompts at once; the same call gives the same responses.

        Calls of several threads follow each other.

        Args:
            prompts: Text, or lists of messages ``{"role": ..., "content": ...}``; one text or conversation is a list of one.
            samples: Responses a prompt.
            chat_template: Whether text goes through the tokenizer's chat template, where it has
                one, as the user's message.
            sampling: ``max_new_tokens``, ``temperature`` (0: greedy), ``top_k``, ``top_p``,
                ``min_p``, ``stop_strings``, ``stop_token_ids``; what is not given is the run's, or
                a recipe's default, but for ``max_new_tokens``: 256, or the room that a prompt leaves.

        Returns:
            One a prompt and sample, in order.

        Raises:
            ConfigError: A sampling value that no distribution has, or no such name.
            DataError: A prompt that is empty or, with ``max_new_tokens``, longer than the context.
        """
        asked: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if asked and all(isinstance(message, Mapping) for message in asked):
            asked = [asked]
        with self._one_call:  # of whose end the engine is emptied
            sequences = self.sequences(asked, samples=samples, seed=seed, chat_template=chat_template, **sampling)
            return [self._completion(asked[s.prompt_index], s) for s in self.decode(sequences)]

    def sequences(
        self,
        prompts: Sequence[str | Messages],
        *,
        names: Sequence[str] = (),
        samples: int = 1,
        seed: int = 0,
        chat_template: bool = True,
        **sampling: Any,
    ) -> list[TokenSequence]:
        """What :meth:`generate` decodes, with nothing sampled yet: one a prompt and sample, in order.

        Args:
            names: Of the prompts, for errors.
        """
        from llamarl.determinism import derive_seed
        from llamarl.engine.factory import sampling_params
        from llamarl.engine.sequence import Sequence as TokenSequence

        names = names or [f"prompts[{index}]" for index in range(len(prompts))]
        tokens = [self._encode(prompt, name, chat_template) for prompt, name in zip(prompts, names, strict=True)]
        known = {field.name for field in dataclasses.fields(self.config.generator.sampling)}
        if unknown := sorted(set(sampling) - known):
            raise ConfigError(
                f"generate has no setting {unknown[0]!r}; it has samples, seed, {', '.join(sorted(known))}"
            )
        if samples < 1:
            raise ConfigError(f"samples must be >= 1, got {samples}")
        fitted = not self._of_a_run and "max_new_tokens" not in sampling
        try:
            changed = dataclasses.replace(self.config.generator.sampling, **sampling)
        except ValidationError as error:
            found = mistakes_of(error, type(self.config.generator.sampling))
            raise ConfigError("; ".join(map(str, found)), mistakes=found) from error
        of_all = sampling_params(changed, self.tokenizer)
        rooms = [max(1, min(256, self.context_length - len(prompt))) for prompt in tokens]
        params = [dataclasses.replace(of_all, max_new_tokens=room) if fitted else of_all for room in rooms]
        for name, prompt, own in zip(names, tokens, params, strict=True):
            if len(prompt) + own.max_new_tokens > self.context_length:
                raise DataError(
                    f"{name}: {len(prompt)} prompt tokens and max_new_tokens = {own.max_new_tokens} exceed the "
                    f"model's context of {self.context_length} tokens: shorten the prompt or lower max_new_tokens"
                )
        return [
            TokenSequence(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=prompt,
                params=params[index],
                seed=derive_seed(operator.index(seed), index, sample),
            )
            for index, prompt in enumerate(tokens)
            for sample in range(samples)
        ]

    def decode(
        self, sequences: Sequence[TokenSequence], after_step: Callable[[Sequence[TokenSequence]], None] | None = None
    ) -> Iterator[TokenSequence]:
        """Sample all at once; each is given back when it and those before it are finished.

        Args:
            after_step: Called with all of them after each step of the engine.
        """
        from llamarl.engine.sequence import written

        done = 0
        num, finished = len(sequences), lambda: sum(s.finished for s in sequences)
        watch("sampling", "response", num, finished, lambda: written(sequences))
        try:
            self._engine.add(sequences)
            while self._engine.has_work:
                self._engine.step()
                if after_step is not None:
                    after_step(sequences)
                while done < len(sequences) and sequences[done].finished:
                    yield sequences[done]
                    done += 1
        except ValueError as error:
            raise DataError(str(error)) from error
        finally:
            forget()
            self._engine.suspend()  # nothing of an interrupted call may answer in the next one

    def _encode(self, prompt: str | Messages, name: str, chat_template: bool) -> list[int]:
        from llamarl.data.items import TaskItem, read_messages
        from llamarl.data.prompts import render_prompt

        data: DataConfig = self.config.data
        if isinstance(prompt, str):
            item = TaskItem(question=prompt)
            data = data if chat_template else dataclasses.replace(data, chat_template="none")
        elif not self.tokenizer.chat_template:
            raise DataError(f"{name}: this model has no chat template: give text instead of messages")
        else:
            item = TaskItem(question="", messages=tuple(read_messages({"messages": list(prompt)}, name) or ()))
            data = dataclasses.replace(data, chat_template="auto")
        try:
            _, tokens = render_prompt(item, self.tokenizer, data)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        return [int(token) for token in tokens]

    def _completion(self, prompt: str | Messages, sequence: Any) -> Completion:
        return Completion(
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            sample=sequence.sample_index,
            text=str(self.tokenizer.decode(sequence.tokens, skip_special_tokens=True)),
            tokens=tuple(sequence.tokens),
            logprobs=tuple(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            error=sequence.error,
        )

    def __repr__(self) -> str:
        return f"LLM({self.config.model.path!r})"
