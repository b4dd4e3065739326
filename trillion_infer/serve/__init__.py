"""The HTTP server: OpenAI's endpoints over one Generator."""
