"""For all tests: how hypothesis runs, that no model hub is asked, and one thread for each of the processes that share the cores."""

import gc
import io
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tests run side by side; threads that wait for each other cost more than they give
gc.disable()  # until all is collected: importing makes much and drops nothing
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks anybody but a server of its own (``hub_server``)

# Examples that write files take more than hypothesis' 200 ms on a busy machine; slow is not wrong.
settings.register_profile("llamarl", deadline=None)
settings.load_profile("llamarl")


@pytest.fixture
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For a command that is refused in this process: nothing is started ahead for its ranks, which would stay as long as the tests do;
    afterwards SIGTERM does what it did before."""
    monkeypatch.setattr("llamarl.controller.prepare.start_fork_servers", lambda config: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def alone() -> Iterator[None]:
    """Afterwards this process is on no network and offers nothing (``other_space``)."""
    from other_space import alone_again

    with alone_again():
        yield


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to it is kept; as wide as a live display needs."""
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return out


def pytest_collection_finish() -> None:
    """All modules and tests are there until the end: no collection looks through them (0.4 s of a core each)."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Modules are taken apart at the end: of those that stay, Triton's prints every type as a leak."""
    gc.unfreeze()
