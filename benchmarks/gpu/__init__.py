"""What `make gpu-check` runs on a GPU."""
