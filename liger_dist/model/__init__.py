"""Structure of a Hugging Face model, its PEFT layers and classes, and the torch modes that it runs under."""
