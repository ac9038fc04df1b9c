"""The emulator backend of mpbackend."""
