"""CUDA graphs, streams, and processes on several GPUs. They have run on no GPU yet: only against stand-ins of one."""
