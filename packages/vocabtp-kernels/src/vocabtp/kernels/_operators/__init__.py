"""The ops as custom operators, for torch.compile; elsewhere the autograd.Functions cost less."""
