"""Importing this sets what torch reads when it is imported, for one thread, as ranks have it: for the process that forks commands."""

import os

from forked_command import ENVIRONMENT

os.environ.update(ENVIRONMENT)
