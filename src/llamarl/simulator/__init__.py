"""The real controller on a virtual clock."""
