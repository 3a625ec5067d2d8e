"""The masked autoencoder as single-device PyTorch: readable and testable without Ray or torch.distributed."""
