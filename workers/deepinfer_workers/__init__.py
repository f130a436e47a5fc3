"""What runs in a worker process: models, KV storage, sampling. Importing the package does not import torch."""
