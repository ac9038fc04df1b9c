"""The CUDA backend of mpbackend."""
