"""The recipes that ship with llamarl: complete jobs to start from. ``llamarl train NAME`` runs one."""
