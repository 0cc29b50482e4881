"""The dataflow graph of a job, the loop that fires it, and the watchdog over every wait."""
