"""The fused loss inside lm_head's call: swapped classes of model and lm_head, and the state of one call."""
