"""The capability matrices that mpbackend ships, as package data."""
