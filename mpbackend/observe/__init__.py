"""Observing a run: the record, and what was really computed."""
