"""A second host that goes on with the run when this one is gone: it holds a copy of the run's folder, some seconds old.

open_standby ─▶ does it have models, data and code? ─▶ Mirror ═▶ worker there ── connection lost ─▶ llamarl.cli.take_over
end of the run, in whatever order ─▶ the copy is forgotten
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llamarl.config import RunConfig, to_plain
from llamarl.controller.job_files import client_of
from llamarl.controller.job_hosts import key_for
from llamarl.errors import ConfigError, RunTakenOver, TransferError
from llamarl.files.client import FileClient
from llamarl.files.content import content_of, paths_in, same_there
from llamarl.files.mirror import Mirror
from llamarl.runtime.config import parse_worker
from llamarl.runtime.hosts.keys import key_file, read_key

__all__ = ["Standby", "check_standby", "consents", "open_standby"]

_END_S = 10.0


class Standby:
    """Of one run.

    Args:
        run: By which the host knows it.
    """

    def __init__(self, client: FileClient, run: str, mirror: Mirror) -> None:
        self._client, self._run, self._mirror = client, run, mirror

    def check(self) -> None:
        """Raises RunTakenOver if the host has gone on with the run, as it does when it has not heard of this process for long."""
        if self._mirror.lost:
            raise RunTakenOver(
                f"the standby {self._client.host} had not heard of this controller and has taken the run over: it goes on there, "
                "in the folder that the worker there names. This run ends here; its files stay as they are"
            )

    def close(self) -> None:
        """The run has ended: nobody is to go on with it. Takes at most some ten seconds."""
        self._mirror.close(_END_S)
        try:
            self._client.forget(self._run)
        except TransferError:  # it has taken the run over, or cannot be reached and will
            return
        finally:
            self._client.close()


def open_standby(
    config: RunConfig,
    local: RunConfig,
    run_dir: Path,
    run_id: str,
    tell: Callable[[str], None],
    *,
    goes_on: bool = False,
) -> Standby | None:
    """Have ``hosts.standby`` stand by; None where there is none.

    Args:
        local: The same with folders of this machine for models and data of the Hub.
        tell: Takes a line of news for the user.
        goes_on: The run has begun before. Then it goes on, and that is told, if its standby cannot be reached.

    Raises:
        ConfigError: The host cannot be reached, has another key, or lacks what the run needs; each path is named.
    """
    if not config.hosts.standby:
        return None
    client = _client(config)
    try:
        _refuse_lacking(client, local)
        run, _ = client.open_run(run_id)
        mirror = Mirror(run_dir, client, run, tell)
        mirror.once()
        client.stand_by(run, consents(config), config.hosts.standby_after_s)
    except TransferError as error:
        client.close()
        if not goes_on:
            raise ConfigError(f"hosts.standby: {error}") from error
        tell(f"the run goes on without its standby, which the next resume asks again (hosts.standby): {error}")
        return None
    except BaseException:
        client.close()
        raise
    mirror.start()
    return Standby(client, run, mirror)


def check_standby(config: RunConfig, local: RunConfig, *, goes_on: bool = False) -> str:
    """What :func:`open_standby` would find; nobody stands by yet.

    Returns:
        A line for people: that it is there, or that the run would go on without it.

    Raises:
        ConfigError: As :func:`open_standby`.
    """
    client = _client(config)
    try:
        client.keeps("no run yet")  # a recipe that names no file leaves nothing else to ask
        _refuse_lacking(client, local)
    except TransferError as error:
        if not goes_on:
            raise ConfigError(f"hosts.standby: {error}") from error
        return f"{client.host} cannot be asked, and the run would go on without it: {error}"
    finally:
        client.close()
    after = f"{config.hosts.standby_after_s:g} s after its controller is gone"
    return f"{client.host}: has the models, data and code of this run, and takes over {after}"


def consents(config: RunConfig) -> list[str]:
    """What a resume asks a person for, and the person who named the standby has given: words for ``llamarl train --resume``."""
    words = []
    if config.model.trust_remote_code:
        words.append("--model.trust_remote_code=true")
    for name, executor in config.executors.items():
        if executor.settings.get("model", {}).get("trust_remote_code"):
            words.append(f"--executors.{name}.settings.model.trust_remote_code=true")
    if config.hosts.start != "running":
        words.append(f"--hosts.command={config.hosts.command}")
    return words


def _client(config: RunConfig) -> FileClient:
    path = key_file(config.hosts.key)
    if not path.exists():
        raise ConfigError(
            f"hosts.standby: there is no {path} with the key of the worker there; copy it: scp -p HOST:{path} {path}"
        )
    return client_of(parse_worker(config.hosts.standby), key_for(config, read_key(path)))


def _refuse_lacking(client: FileClient, local: RunConfig) -> None:
    if lacking := _lacking(client, local):
        listed = "\n".join(f"  - {name}" for name in lacking)
        raise ConfigError(
            f"hosts.standby: {client.host} could not go on with the run, it lacks (or has otherwise):\n{listed}\n"
            "Put the same there, under the same path."
        )


def _lacking(client: FileClient, config: RunConfig) -> list[str]:
    """Models, data and code of the run that the host does not have."""
    lacking = []
    for name in paths_in(to_plain(config)):
        path = Path(name).expanduser().absolute()
        if not same_there(client, path) and client.holds(path, content_of(path).files) is None:
            lacking.append(str(path))
    return lacking
