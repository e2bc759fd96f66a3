"""Public ops: validation, dispatch to a backend, autograd. One file an op, named like its kernel and its reference."""
