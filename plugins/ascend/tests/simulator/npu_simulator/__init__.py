"""Kernels of a simulated Ascend device: torch's CPU kernels over the stand-in runtime's device memory. See the README beside the package."""
