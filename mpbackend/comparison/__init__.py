"""Two sets of recorded runs, and what can be said about them at equal quality. Pure: no torch, no vendor software."""
