"""Machine-written evidence: one JSON file a device, from probes and conformance runs."""
