"""llamarl from Python: what ``import llamarl`` offers. The same jobs as the command line's, by the same code."""
