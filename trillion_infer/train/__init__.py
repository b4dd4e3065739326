"""Training heads that draft: answers by the target, its hidden states, unrolled training, checkpoints, export."""
