"""Environments that come with llamarl: pure Python, offline, a function of seed and replies."""
