"""Files between hosts that share no folder: a run's output to its controller, saved states, models
and data to the hosts."""
