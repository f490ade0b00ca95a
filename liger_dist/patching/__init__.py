"""What is changed on a model instance, and what is read off it. Knows models, not sharding."""
