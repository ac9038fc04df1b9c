"""Templates of the HTML reports, as package data."""
