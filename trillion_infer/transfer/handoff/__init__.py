"""The hand-off of KV pages between a worker that prefills and one that decodes: messages, states, links."""
