"""Importing this sets what torch reads when it is imported, for one thread, as ranks have it: for the process that forks commands."""

import os

from forked_command import ENVIRONMENT, TESTS

os.environ.update(ENVIRONMENT)
given = os.environ.pop("PYTHONPATH").split(os.pathsep)
if others := [path for path in given if path != TESTS]:
    os.environ["PYTHONPATH"] = os.pathsep.join(others)
