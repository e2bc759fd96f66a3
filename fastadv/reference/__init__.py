"""The specification: every op in plain PyTorch, on any device, exact in float64."""
