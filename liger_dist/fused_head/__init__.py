"""The fused loss inside lm_head's own call: hooks of one model instance, and the state of one call."""
