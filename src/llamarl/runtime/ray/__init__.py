"""Ranks on the nodes of a Ray cluster: Ray starts an agent a node and tells of its end, the agent
forks the ranks. Alone here, in ``files/over_ray.py`` and in ``cli/`` Ray is imported, and only
where a job asks for a cluster."""
