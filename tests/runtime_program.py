"""A controller as a program of its own, for tests that kill it: runs the fake job and prints what happened."""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from runtime_fakes import HERE, Config, job

from llamarl.config import DeadlineConfig
from llamarl.controller.controller import run_graph
from llamarl.controller.graph import Graph
from llamarl.controller.marking import Marking
from llamarl.errors import LlamaRLError
from llamarl.runtime.processes import ProcessRuntime


class Pids:
    def on_report(self, report: object) -> None:
        print(f"report {report.executor} {report.tick}", flush=True)  # type: ignore[attr-defined]


def main() -> int:
    arguments = json.loads(sys.argv[1])
    executors, channels = job(**{name: Config(**config) for name, config in arguments["configs"].items()})
    runtime = ProcessRuntime(channel_factory=str(HERE))
    code = 0
    try:
        run_graph(
            Marking(Graph(tuple(executors), tuple(channels)), num_ticks=arguments["num_ticks"]),
            runtime,
            seed=0,
            run_dir=Path(arguments["run_dir"]),
            observers=[Pids()],
            deadlines=DeadlineConfig(step_s=arguments["step_s"]),
        )
    except LlamaRLError as error:
        print(f"ended: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        print("ended: stopped by the user", file=sys.stderr)
        code = 130
    finally:
        runtime.close()
    return code


def in_a_session_of_its_own() -> int:
    """Also where a job in the background has left "ignore" for Ctrl-C."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(main())
