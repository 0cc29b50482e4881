"""The training step: packing, log-probs by chunk, optimizer."""
