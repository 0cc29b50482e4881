"""Any agent program: a function that talks to an OpenAI-compatible endpoint, runs its own tools,
and says what it was worth.

    reset ──▶ function(item, base_url, api_key, model) in a thread ──first request──▶ Observation
    step(reply) ──answers the request that is open──▶ the program goes on ──next request──▶ Step
                                                                └──returns──▶ Step(done), with its reward

The endpoint is llamarl's (``chat_server``) and of this episode alone. So an agent needs no other
code than it has; that what it sends is a function of item, seed and replies, is for it to see to,
as for any environment.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llamarl.data.items import TaskItem
from llamarl.environments.adapters.chat_server import MODEL, Called, ChatServer, Refused
from llamarl.environments.episode import EpisodeOver, Observation, Step
from llamarl.environments.functions import finite
from llamarl.environments.games.game import OwnRandomness, checked
from llamarl.environments.tools import waited_for
from llamarl.import_path import import_user, signature_of

__all__ = ["AgentFailed", "AgentProgram"]

_END_S = 2.0
"""For a program to end, once its episode has."""
_left: list[threading.Thread] = []
"""Of programs that had not ended by then."""
_KEY = "task.environment"


class AgentFailed(RuntimeError):
    """An agent's episode that has no outcome, and why."""


@dataclass(frozen=True, slots=True)
class _Returned:
    value: object


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


class AgentProgram:
    """Plays a function of the user's.

    Args:
        path: Of the function: ``file.py:function`` or ``package.module:function``. It is given
            those of ``item``, ``base_url``, ``api_key``, ``model`` and ``seed`` that it has
            parameters for, and may be async.
        judged: Whether ``task.reward`` judges too, so that the function may return None.
        settings: Further arguments of the function.

    Raises:
        DataError: There is no such function.
        TypeError: It cannot be called so.
    """

    @checked
    def __init__(self, path: str, *, judged: bool = True, **settings: Any) -> None:
        self._function = import_user(path, _KEY)
        self._judged, self._settings = judged, settings
        self._given = _given(self._function, settings)
        self._own = OwnRandomness()
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._server: ChatServer | None = None
        self._thread: threading.Thread | None = None

    def reset(self, item: TaskItem, seed: int) -> Observation:
        """Start the program; what it first asks the model is the observation.

        Raises:
            AgentFailed: It ended without asking, or asked for something that cannot be part of an episode.
            Exception: What the program raised.
        """
        self.close()
        self._own = OwnRandomness(seed)
        self._events = queue.SimpleQueue()
        self._server = server = ChatServer(self._events)
        known = {"item": item, "base_url": server.base_url, "api_key": server.api_key, "model": MODEL, "seed": seed}
        arguments = {**{name: known[name] for name in self._given}, **self._settings}
        self._thread = threading.Thread(
            target=_run, args=(self._function, arguments, self._events), daemon=True, name="agent"
        )
        called = self._next_after(self._thread.start)
        if isinstance(called, Step):
            raise AgentFailed("the agent returned without asking the model: there is nothing to train on")
        return Observation(messages=called.messages, tools=called.tools)

    def step(self, reply: str) -> Step:
        """Answer the request that is open, and wait for the next one, or for the program's end.

        Raises:
            AgentFailed, NotANumber, Exception: As ``reset``, or it returned no reward.
        """
        server = self._server
        if server is None:
            raise EpisodeOver("the agent has returned; reset begins the next episode")
        called = self._next_after(lambda: server.answer(reply))
        return called if isinstance(called, Step) else Step(messages=called.messages)

    def close(self) -> None:
        """End the endpoint. The program's open request gets an error, which should end it."""
        server, self._server = self._server, None
        thread, self._thread = self._thread, None
        if server is None or thread is None:
            return
        with self._own:
            server.close()
            _left[:] = filter(threading.Thread.is_alive, _left)
            thread.join(_END_S / 20 if _left else _END_S)  # many that try again would hold up the worker's next episode
        if thread.is_alive():
            _left.append(thread)
            print("the agent did not end with its episode, and is left alone", file=sys.stderr)

    def _next_after(self, act: Callable[[], None]) -> Called | Step:
        """What the program does next; where it is no request, the episode is over."""
        called: Called | Step | None = None
        try:
            with self._own:
                act()
                called = self._next()
        finally:
            if not isinstance(called, Called):
                self.close()
        return called

    def _next(self) -> Called | Step:
        event = self._events.get()  # a worker over task.pool.timeout_s is ended
        if isinstance(event, Called):
            return event
        if isinstance(event, _Returned):
            return _outcome(event.value, judged=self._judged)
        if isinstance(event, Refused):
            raise AgentFailed(f"the agent's request was refused: {event.cause}")
        if isinstance(event.error, Exception):
            raise event.error
        raise AgentFailed(f"the agent ended with {event.error!r}") from event.error


def _run(function: Callable[..., Any], arguments: Mapping[str, Any], events: queue.SimpleQueue[Any]) -> None:
    try:
        value = waited_for(function(**arguments))
    except BaseException as error:  # the user's code may raise anything, sys.exit among it; whoever plays raises it
        events.put(_Raised(error))
    else:
        events.put(_Returned(value))


def _given(function: Callable[..., Any], settings: Mapping[str, Any]) -> list[str]:
    """Which of the episode's facts a function takes."""
    known = ("item", "base_url", "api_key", "model", "seed")
    if clash := sorted(set(settings) & set(known)):
        raise TypeError(f"{clash[0]} is given by the episode, and cannot be an option")
    signature = signature_of(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = [name for name in known if takes_all or name in signature.parameters]
    if "base_url" not in given:
        raise TypeError(
            "an agent is a function with the parameter base_url, and those of item, api_key, model and seed it needs"
        )
    try:
        signature.bind(**dict.fromkeys(given), **settings)
    except TypeError as error:
        raise TypeError(f"it cannot be called with {', '.join([*given, *settings])}: {error}") from error
    return given


def _outcome(value: object, *, judged: bool) -> Step:
    """The end of an episode from what the function returned."""
    rest: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise AgentFailed(f"the agent returned a mapping without reward: {sorted(map(str, value))}")
        rest = {str(name): part for name, part in value.items() if name != "reward"}
        value = value["reward"]
    if value is None and not judged:
        raise AgentFailed("the agent returned no reward, and task.reward names nobody who judges")
    reward = 0.0 if value is None else finite("the agent's reward", value)
    parts = {name: finite(f"reward part {name!r} of the agent", part) for name, part in rest.items()}
    return Step(reward=reward, done=True, parts=parts)
