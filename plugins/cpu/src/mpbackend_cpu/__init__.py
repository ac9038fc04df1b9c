"""The CPU backend of mpbackend."""
