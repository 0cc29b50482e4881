"""A program goes on when nobody reads it any more."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

LINES = """
import sys
from llamarl.cli.main import _open_missing_streams, _outlive_the_console
_open_missing_streams()
_outlive_the_console()
for number in range(20000):
    print("line", number)
    print("trouble", number, file=sys.stderr)
open(sys.argv[1], "w").write(f"reached the end, descriptors {sys.stdout.fileno()} {sys.stderr.fileno()}")
"""


def test_a_pipe_whose_reader_has_left_ends_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    program = subprocess.Popen(
        [sys.executable, "-c", LINES, str(proof)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stderr is not None
    assert program.stdout.readline() == "line 0\n" and program.stderr.readline() == "trouble 0\n"
    program.stdout.close()
    program.stderr.close()
    assert program.wait(60) == 0
    assert proof.read_text() == "reached the end, descriptors 1 2"


def test_closed_standard_streams_are_the_null_device_and_no_file_of_the_program(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, LINES, str(proof)], timeout=60
    )
    assert done.returncode == 0
    assert proof.read_text() == "reached the end, descriptors 1 2"  # and no line of the program stands in it


def test_a_full_device_behind_standard_output_ends_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", LINES, str(proof)], stdout=full, stderr=full, timeout=60)
    assert done.returncode == 0 and proof.exists()


def test_what_is_read_arrives_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LINES, str(tmp_path / "proof")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "".join(f"line {n}\n" for n in range(20000))
    assert done.stderr == "".join(f"trouble {n}\n" for n in range(20000))


def test_a_full_pipe_that_somebody_made_non_blocking_is_waited_for(tmp_path: Path) -> None:
    """Whoever shares a terminal or a pipe may do so; a write into it then fails where it would have waited."""
    proof = tmp_path / "proof"
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(write, False)
    program = subprocess.Popen([sys.executable, "-c", LINES, str(proof)], stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    held, until = 0, time.monotonic() + 60
    while held < 4096 - len("line 10000\n"):
        assert program.poll() is None and time.monotonic() < until
        held = struct.unpack("i", fcntl.ioctl(read, termios.FIONREAD, bytes(4)))[0]
        time.sleep(0.01)
    time.sleep(0.1)  # its next line does not fit
    with open(read) as pipe:
        assert pipe.read() == "".join(f"line {n}\n" for n in range(20000))
    assert program.wait(60) == 0 and proof.exists()


def test_a_terminal_is_still_seen_as_one() -> None:
    """The live console asks the stream."""
    main, side = os.openpty()
    code = "import sys; from llamarl.cli.main import _outlive_the_console as o; o(); sys.exit(not sys.stdout.isatty())"
    assert subprocess.run([sys.executable, "-c", code], stdout=side, timeout=60).returncode == 0
    os.close(main)
    os.close(side)


BROKEN = """
import sys
from llamarl.cli import main, train
def run(args):
    raise BrokenPipeError("a socket of the user's own")
train.run = run
sys.exit(main.main(["train", "tiny"]))
"""


def test_a_run_in_which_a_pipe_breaks_has_not_come_to_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.endswith("BrokenPipeError: a socket of the user's own\n")
