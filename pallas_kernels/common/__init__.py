"""What the operations share: the choice of a backend and its errors."""
