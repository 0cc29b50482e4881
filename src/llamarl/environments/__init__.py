"""Tasks and their judges; user code runs in worker processes with a time limit."""
