"""What `make docs` writes: pages made from the code, and the outputs of the commands and examples that the other pages show."""
