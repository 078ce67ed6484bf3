"""Long proofs, by make targets of their own: planted faults, sanitizers, storms, damaged files."""
