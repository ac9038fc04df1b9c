"""An mpbackend plugin for the Acme X1, an accelerator that does not exist."""
