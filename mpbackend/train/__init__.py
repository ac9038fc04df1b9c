"""Training: the session and what it is made of."""
