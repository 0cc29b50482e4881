"""Runs under random deaths and hangs, beside the same run undisturbed: do the bits agree, and what did it cost?"""
