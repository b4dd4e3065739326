"""Engines of several processes that hand KV pages to each other: the workers around the protocol in transfer/."""
