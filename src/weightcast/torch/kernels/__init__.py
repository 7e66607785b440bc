"""Kernels on torch tensors, one module per kind of device."""
