"""Other libraries' environments, seen as ``llamarl.environments.episode.Environment``."""
