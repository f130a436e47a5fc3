"""DeepSeek-V4.1 and V4: what a config.json says, what a checkpoint holds, and the forward pass."""
