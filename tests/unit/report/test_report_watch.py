"""``llamarl watch``: what is served, to whom, and that a run which goes on is seen."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from made_run import MadeRun, decode_block

from llamarl import bounded_server
from llamarl.bounded_server import MAX_CONNECTIONS
from llamarl.cli.main import main
from llamarl.errors import ConfigError
from llamarl.report.run_data import RunReader
from llamarl.report.server import READ_EVERY_S, WatchedRuns, WatchServer, make_server

Get = Callable[..., tuple[int, str]]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return MadeRun(ticks=3, settings={"run.num_ticks": "9"}).write(tmp_path / "run")


@contextlib.contextmanager
def serving(run: Path, *address: str) -> Iterator[WatchServer]:
    server = make_server(WatchedRuns([run], 5_000_000), 0, *address)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


@pytest.fixture
def served(run: Path) -> Iterator[WatchServer]:
    with serving(run) as server:
        yield server


def test_the_start_waits_for_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda name="": pytest.fail(f"asked for the name of {name}"))
    server = bounded_server.BoundedServer(("0.0.0.0", 0), bounded_server.QuietHandler)
    server.server_close()
    assert server.server_port > 0


def answer_to(server: WatchServer, path: str, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


@pytest.fixture
def get(served: WatchServer) -> Get:
    """Asks as the page does, with the cookie that the printed address gave."""
    first, _ = answer_to(served, served.url.partition(str(served.server_port))[2], {})
    assert (first.status, first.headers["Location"]) == (303, "/")
    cookie, *limits = first.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(limits)

    def ask(path: str, host: str = "") -> tuple[int, str]:
        answer, text = answer_to(served, path, {"Cookie": cookie, **({"Host": host} if host else {})})
        return answer.status, text

    return ask


def test_a_long_cookie_of_a_stranger_takes_no_time(served: WatchServer) -> None:
    begun = time.process_time()
    cookie = f'llamarl-{served.server_port}="' + 30_000 * "\\0" + '"'  # the standard library unquotes it in 10 s
    assert answer_to(served, "/state", {"Cookie": cookie})[0].status == 403
    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize(
    "path", ["/", "/state", "/block/0/config", "/charts.js", "/?token=", "/?token=guess", "/state?token=%00"]
)
@pytest.mark.parametrize("cookie", ["", "llamarl-PORT=guess", "llamarl-PORT=", "llamarl-1=TOKEN", "\x00=;;"])
def test_who_does_not_have_the_printed_address_is_shown_nothing(served: WatchServer, path: str, cookie: str) -> None:
    headers = {"Cookie": cookie.replace("PORT", str(served.server_port)).replace("TOKEN", served.token)}
    answer, text = answer_to(served, path, headers if cookie else {})
    assert (answer.status, text) == (403, "open the address that llamarl watch has printed")


def test_on_another_address_it_is_reached_by_any_name_and_wants_the_token_all_the_same(run: Path) -> None:
    with serving(run, "0.0.0.0") as server:
        assert server.url.startswith(f"http://{socket.gethostname()}:{server.server_port}/?token=")
        host = {"Host": f"gpu-1.example:{server.server_port}"}
        assert answer_to(server, "/state", host)[0].status == 403
        answer, _ = answer_to(server, f"/?token={server.token}", host)
        assert answer.status == 303
        cookie = (answer.getheader("Set-Cookie") or "").partition(";")[0]
        assert answer_to(server, "/state", {**host, "Cookie": cookie})[0].status == 200


@pytest.mark.parametrize("bind", ["192.0.2.1", "::1", "no such host"])
def test_an_address_of_another_machine_is_refused_by_its_flag(run: Path, bind: str) -> None:
    with pytest.raises(ConfigError, match=f"--bind {bind}: is no IPv4 address of this machine"):
        make_server(WatchedRuns([run], 5_000_000), 0, bind)


def test_each_server_has_a_token_of_its_own(served: WatchServer, run: Path) -> None:
    with make_server(WatchedRuns([run], 5_000_000), 0) as other:
        assert other.token != served.token and len(other.token) >= 32


def test_requests_that_never_end_are_ended_and_too_many_are_closed_at_once(
    served: WatchServer, get: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_server, "REQUEST_S", 0.3)
    monkeypatch.setattr(served.RequestHandlerClass, "timeout", 0.3)
    before = threading.active_count()
    half = [socket.create_connection(("127.0.0.1", served.server_port), timeout=10) for _ in range(4 * MAX_CONNECTIONS)]
    for connection in half[:MAX_CONNECTIONS]:
        connection.sendall(b"GET /state HTTP/1.0\r\nX: ")
    assert all(connection.recv(1) == b"" for connection in half)  # each is closed, and none of them answered
    until = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert get("/state")[0] == 200
    for connection in half:
        connection.close()


def test_half_open_connections_do_not_keep_the_owner_out(served: WatchServer, get: Get) -> None:
    half = [socket.create_connection(("127.0.0.1", served.server_port), timeout=5) for _ in range(MAX_CONNECTIONS)]
    for connection in half:
        connection.sendall(b"GET /state HTTP/1.0\r\nX: ")
    assert [get("/state")[0] for _ in range(3)] == [200] * 3
    assert half[0].recv(1) == b""  # the oldest has given way, and the newest is still there
    half[-1].settimeout(0.2)
    with pytest.raises(TimeoutError):
        half[-1].recv(1)
    for connection in half:
        connection.close()


def test_every_block_that_the_state_names_is_served(get: Get) -> None:
    status, state = get("/state")
    names = json.loads(state)["blocks"]
    assert status == 200 and {"0/run", "0/metrics", "0/timeline", "0/index", "0/config", "0/detail/2"} <= set(names)
    for name in names:
        status, text = get(f"/block/{name}")
        assert status == 200 and decode_block(text)


def test_nothing_else_is_served(get: Get) -> None:
    for path in (
        "/block/0/../../config.toml",
        "/../config.toml",
        "/config.toml",
        "/block/",
        "/block/1/run",
        "/etc/passwd",
    ):
        assert get(path) == (404, "nothing here")


def test_a_name_that_was_made_to_point_here_gets_no_answer(get: Get) -> None:
    assert get("/state", host="evil.example:80")[0] == 403
    assert get("/state", host="localhost:1234")[0] == 200


def test_the_page_holds_no_data_and_reaches_its_own_server_alone(get: Get) -> None:
    pytest.importorskip("plotly")
    status, page = get("/")
    assert status == 200 and 'data-watch="1"' in page and "block:" not in page.split("<script>")[0]
    assert "connect-src &#x27;self&#x27;" in page and "default-src &#x27;none&#x27;" in page
    assert get("/charts.js")[0] == 200


def test_new_ticks_are_read_when_the_last_reading_is_old(run: Path, tmp_path: Path) -> None:
    clock = Clock()
    runs = WatchedRuns([run], 5_000_000, clock)
    before = runs.state()["blocks"]
    longer = MadeRun(ticks=4, settings={"run.num_ticks": "9"}).write(tmp_path / "longer")
    for name in ("metrics.jsonl", "trace.json", "rollouts/tick_000003.jsonl"):
        (run / name).write_bytes((longer / name).read_bytes())
    clock.now_s += 0.9 * READ_EVERY_S
    assert runs.state()["blocks"] == before
    clock.now_s += 0.2 * READ_EVERY_S
    after = runs.state()["blocks"]
    assert decode_block(runs.blocks()["0/run"])["ticks"] == 4
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {"0/run", "0/metrics", "0/timeline", "0/index", "0/detail/3"}


def test_a_reading_that_takes_long_is_seldom(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, read = Clock(), []

    def slow(reader: RunReader, room: int) -> dict[str, str]:
        clock.now_s += 3.0
        read.append(clock.now_s)
        return {}

    monkeypatch.setattr(RunReader, "blocks", slow)
    runs = WatchedRuns([run], 5_000_000, clock)
    for _ in range(31):  # a reading ends at 3 s, the next may begin 27 s later
        runs.blocks()
        clock.now_s += 1.0
    assert len(read) == 2


def test_a_run_that_begins_in_a_watched_folder_is_shown_beside_the_others(run: Path, tmp_path: Path) -> None:
    clock = Clock()
    runs = WatchedRuns([tmp_path], 5_000_000, clock)
    before = runs.blocks()
    assert {name.split("/")[0] for name in before} == {"0"}
    MadeRun(ticks=1).write(tmp_path / "a later one")
    clock.now_s += 1.1 * READ_EVERY_S
    after = runs.blocks()
    assert [decode_block(after[f"{number}/run"])["name"] for number in range(2)] == ["run", "a later one"]
    assert after["0/metrics"] == before["0/metrics"]


def test_a_port_that_is_taken_and_one_that_is_none_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_server(WatchedRuns([run], 5_000_000), 0) as server:
        with pytest.raises(ConfigError, match="cannot be listened on"):
            make_server(WatchedRuns([run], 5_000_000), server.server_port)
    assert main(["watch", str(run), "--port", "70000"]) != 0
    assert "--port must be between" in capsys.readouterr().err
