"""Who runs in the next step: admission, chunked prefill, decode, preemption. Plain Python, no JAX, no I/O."""
