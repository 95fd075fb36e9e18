"""CUDA graphs, streams, and processes on several GPUs. They have not run on a GPU yet, only against stand-ins for one."""
