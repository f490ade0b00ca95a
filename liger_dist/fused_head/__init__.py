"""The fused loss inside lm_head's own call: swapped classes of model and lm_head, and the state of one call."""
