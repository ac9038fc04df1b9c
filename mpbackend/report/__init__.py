"""Reports: pure functions from records and matrices to terminal, Markdown and HTML."""
