"""One file per way a weight is stored: framework objects in, plain tensors out."""
