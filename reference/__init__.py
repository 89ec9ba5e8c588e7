"""Pure PyTorch references, one module per subject; they import torch and one another only."""
