"""Prompt streams and chat templates."""
