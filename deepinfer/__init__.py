"""DeepInfer: an asynchronous streaming runtime for large language models."""
