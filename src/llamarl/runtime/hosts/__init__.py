"""Ranks on the nodes of a cluster, of whatever kind: an agent on each node, the links to its ranks,
and what the kind itself owes (``cluster.py``)."""
