"""What a Hugging Face model is made of: structure, PEFT layers, classes, and the modes of torch that it runs in."""
