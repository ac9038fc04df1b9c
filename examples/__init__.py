"""Examples that are also shipped, so that `mpbackend demo` runs from a wheel."""
