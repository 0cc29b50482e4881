"""``llamarl.LLM``: sampling from a model with the engine that runs use."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from llamarl.config import DataConfig, ModelConfig, RunConfig, load_config
from llamarl.errors import ConfigError, DataError

__all__ = ["LLM", "Completion"]

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


class LLM:
    """A model, ready to sample from.

        llm = llamarl.LLM("bundled:tiny")
        llm.generate(["a3 b9 =\\n"], max_new_tokens=20)[0].text

    Args:
        path: Hugging Face folder, run folder (its policy and settings), LoRA adapter folder, the id of a model of the
            Hugging Face Hub (``org/name``), or ``bundled:tiny``.
        base: Base model of an adapter; None: the one that it names.
        revision: Branch, tag or commit of a model of the Hub; empty is ``main``.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is one.
        dtype: To compute in, such as ``bfloat16``; None: the run's, else float32.
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
        revision: str = "",
        device: str = "auto",
        dtype: str | None = None,
        quantization: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        from llamarl.engine.factory import make_engine, resolve_device
        from llamarl.executors.self_check import check_generated
        from llamarl.executors.version_loader import load_adapter
        from llamarl.models.folders import local_model_path
        from llamarl.models.loading import context_length, load_tokenizer
        from llamarl.models.named import find_model

        named = find_model(os.fspath(path), base)
        config = RunConfig() if named.recipe is None else load_config(named.recipe)
        generator = config.generator
        if dtype is not None:
            generator = dataclasses.replace(generator, engine=dataclasses.replace(generator.engine, dtype=dtype))  # type: ignore[arg-type]
        if quantization is not None:
            generator = dataclasses.replace(generator, quantization=quantization)  # type: ignore[arg-type]
        code = trust_remote_code or config.model.trust_remote_code
        path = local_model_path(named.path, key="model", revision=revision, code=code)
        model = ModelConfig(path=path, trust_remote_code=code)
        self.config = dataclasses.replace(config, model=model, generator=generator)
        check_generated(self.config)
        self.tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.context_length = context_length(model.path) or 1 << 20
        """Tokens that prompt and response may have together."""
        self._of_a_run = named.run is not None
        self._engine = make_engine(self.config, self.tokenizer, device=resolve_device(device))
        if named.adapter is not None:
            load_adapter(self._engine, named.adapter, model_path=model.path)

    def generate(
        self,
        prompts: str | Sequence[str | Messages],
        *,
        samples: int = 1,
        seed: int = 0,
        chat_template: bool = True,
        **sampling: Any,
    ) -> list[Completion]:
        """Sample responses to all prompts at once; the same call gives the same responses.

        Args:
            prompts: Text, or lists of messages ``{"role": ..., "content": ...}``; one text is a list of one.
            samples: Responses a prompt.
            chat_template: Whether text goes through the tokenizer's chat template, where it has one, as the user's message.
            sampling: ``max_new_tokens``, ``temperature`` (0: greedy), ``top_k``, ``top_p``, ``min_p``, ``stop_strings``,
                ``stop_token_ids``; what is not given is the run's, or a recipe's default.

        Returns:
            One a prompt and sample, in order.

        Raises:
            ConfigError: A sampling value that no distribution has, or no such name.
            DataError: A prompt that is empty or, with ``max_new_tokens``, longer than the context.
        """
        from llamarl.engine.factory import sampling_params
        from llamarl.engine.sequence import Sequence as TokenSequence
        from llamarl.seeding import derive_seed

        asked: list[str | Messages] = [prompts] if isinstance(prompts, str) else list(prompts)
        tokens = [self._encode(prompt, index, chat_template) for index, prompt in enumerate(asked)]
        names = {field.name for field in dataclasses.fields(self.config.generator.sampling)}
        if unknown := sorted(set(sampling) - names):
            raise ConfigError(
                f"generate has no setting {unknown[0]!r}; it has samples, seed, {', '.join(sorted(names))}"
            )
        if samples < 1:
            raise ConfigError(f"samples must be >= 1, got {samples}")
        if not self._of_a_run:
            room = self.context_length - max(map(len, tokens), default=0)
            sampling.setdefault("max_new_tokens", max(1, min(256, room)))
        try:
            changed = dataclasses.replace(self.config.generator.sampling, **sampling)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        params = sampling_params(changed, self.tokenizer)
        sequences = [
            TokenSequence(
                prompt_index=index,
                sample_index=sample,
                prompt_tokens=prompt,
                params=params,
                seed=derive_seed(seed, index, sample),
            )
            for index, prompt in enumerate(tokens)
            for sample in range(samples)
        ]
        try:
            self._engine.add(sequences)
            while self._engine.has_work:
                self._engine.step()
        except ValueError as error:
            raise DataError(str(error)) from error
        finally:
            self._engine.suspend()  # nothing of an interrupted call may answer in the next one
        return [self._completion(asked[s.prompt_index], s) for s in sequences]

    def _encode(self, prompt: str | Messages, index: int, chat_template: bool) -> list[int]:
        from llamarl.data.chat import render_prompt
        from llamarl.data.items import TaskItem, read_messages

        where = f"prompts[{index}]"
        if isinstance(prompt, str):
            item = TaskItem(question=prompt)
        elif not self.tokenizer.chat_template:
            raise DataError(f"{where}: this model has no chat template: give text instead of messages")
        else:
            item = TaskItem(question="", messages=tuple(read_messages({"messages": list(prompt)}, where) or ()))
        data: DataConfig = self.config.data
        if not isinstance(prompt, str) or not chat_template:
            data = dataclasses.replace(data, chat_template="auto" if chat_template else "none")
        try:
            _, tokens = render_prompt(item, self.tokenizer, data)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
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
