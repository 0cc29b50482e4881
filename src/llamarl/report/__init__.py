"""A run as one page: read what it wrote, and see where time, tokens and rewards went.

RUN/ ──run_files, rollout_index, timeline──▶ plain columns ──findings──▶ what looks wrong
                                                  │
                                page: one offline file ◀──┴──▶ server: the same page while the run goes on
"""
