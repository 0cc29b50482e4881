"""Both ends of a transport from its name. Only the one asked for is imported."""

from __future__ import annotations

import difflib

import torch

from llamarl.weight_sync.transports.base import SinkTransport, SourceTransport

__all__ = ["TRANSPORTS", "sink_transport", "source_transport"]

TRANSPORTS = ("shared_memory", "cuda_ipc", "rdma")


def source_transport(name: str, *, num_sink_ranks: int) -> SourceTransport:
    """The source rank's end. ``cuda_ipc`` takes this process's current GPU.

    Raises:
        ValueError: Unknown name.
        WeightSyncError: The transport does not work here.
    """
    if name == "shared_memory":
        from llamarl.weight_sync.transports.shared_memory import SharedMemorySource

        return SharedMemorySource()
    if name == "cuda_ipc":
        from llamarl.weight_sync.transports.cuda_ipc import CudaIpcSource

        return CudaIpcSource(_current_gpu(), num_sink_ranks=num_sink_ranks)
    if name == "rdma":
        from llamarl.weight_sync.transports.rdma import RdmaSource

        return RdmaSource()
    raise _unknown(name)


def sink_transport(name: str, *, rank: int) -> SinkTransport:
    """The end of sink rank ``rank``; otherwise as ``source_transport``."""
    if name == "shared_memory":
        from llamarl.weight_sync.transports.shared_memory import SharedMemorySink

        return SharedMemorySink()
    if name == "cuda_ipc":
        from llamarl.weight_sync.transports.cuda_ipc import CudaIpcSink

        return CudaIpcSink(_current_gpu(), rank=rank)
    if name == "rdma":
        from llamarl.weight_sync.transports.rdma import RdmaSink

        return RdmaSink()
    raise _unknown(name)


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _unknown(name: str) -> ValueError:
    near = difflib.get_close_matches(name, TRANSPORTS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"weight transport {name!r} is unknown, expected one of {', '.join(TRANSPORTS)}{hint}")
