"""``RUN/job.json``: what ran where, for whoever looks at the run later: executors, channels, facts, machine, versions.

Written when a run starts and again when it goes on, so it tells of the last start. Nothing of a run depends on it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llamarl.checkpoint.platform import platform_facts
from llamarl.observability.job_description import JobDescription
from llamarl.observability.writing import cannot_write, replace_file

__all__ = ["JOB_FILE", "job_record", "write_job"]

JOB_FILE = "job.json"


def job_record(job: JobDescription, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content as plain values."""
    return {
        "title": job.title,
        "executors": [asdict(lane) for lane in job.lanes],
        "channels": [asdict(edge) for edge in job.edges],
        "facts": dict(job.facts),
        "machine": dict(machine),
    }


def write_job(run_dir: str | os.PathLike[str], job: JobDescription) -> None:
    """
    Raises:
        LlamaRLError: The folder cannot be written.
    """
    path = Path(run_dir) / JOB_FILE
    machine = {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count(), **platform_facts()}
    text = json.dumps(job_record(job, machine), indent=1, ensure_ascii=False) + "\n"
    try:
        replace_file(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise cannot_write(path, error) from error
