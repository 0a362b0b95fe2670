"""Kernels of our own for CUDA devices. Nothing in here is imported on a machine without one."""
