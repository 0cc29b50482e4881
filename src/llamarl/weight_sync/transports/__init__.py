"""How the bytes of a weight version travel: shared memory, CUDA IPC, RDMA."""
