"""Moving bytes between processes: register memory, open it from elsewhere, read a slice before a deadline, prove it."""
