"""Programs that nobody trusts, each in a box of its own: see ``run``."""
