"""Where executors live: processes of their own, or the controller's own process."""
