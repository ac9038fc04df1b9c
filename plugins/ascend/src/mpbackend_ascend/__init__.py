"""The Ascend backend of mpbackend."""
