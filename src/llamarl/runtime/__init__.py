"""Where executors live: Monarch processes, or the controller's own process."""
