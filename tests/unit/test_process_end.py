"""A process that ends at once leaves out only what nobody sees: what was registered and written is done, and its code is told."""

import subprocess
import sys

BEGINNING = "import atexit, sys, threading, time\nfrom llamarl.process_tree import end_process\n"


def run(program: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", BEGINNING + program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_what_was_registered_is_done_what_was_written_arrives_and_the_code_is_told() -> None:
    program = "atexit.register(print, 'registered')\nsys.stdout.write('written ')\nend_process(3)\nprint('never')"
    assert run(program) == (3, "written registered\n")


def test_a_thread_that_python_would_wait_for_is_waited_for() -> None:
    program = "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nend_process(3)\nsys.exit(4)"
    assert run(program) == (4, "thread\n")


def test_the_command_line_hears_how_its_children_end_where_it_was_started_to_ignore_that() -> None:
    program = """
import signal, subprocess
from llamarl.cli import main
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as a process finds it whose parent ignores its children
main.main = lambda: -subprocess.run(["sh", "-c", "kill -9 $$"]).returncode
main.command()
"""
    assert run(program) == (9, "")
