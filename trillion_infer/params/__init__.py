"""What parameters each kind of layer has: shapes, logical axes and the checkpoint's tensors. Modules in `layers/` hold
them; planning and loading need only this."""
