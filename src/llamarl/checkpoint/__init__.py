"""Atomic, checksummed snapshots of a whole job."""
