"""Ranks on other hosts: a daemon there, one connection to it from the controller.

    controller                            TCP, or TLS inside it                    host b: ``llamarl worker``
    Ranks ─ HostLink ─ HostConnection ═══ frames: start, bytes, kill, ping ═══▶   daemon: a Job a connection
                       (one a host)   ◀══ bytes, output, ended, pong ══════════      └─ guard + rank, a socket pair each

A rank cannot tell whether it was started by the controller or by a daemon: both start the same process with the same socket to
it (:mod:`llamarl.runtime.child_process`), and the daemon hands its bytes on without looking into them. Either way the end of that
socket is the end of the rank: who loses the controller loses the job.
"""
