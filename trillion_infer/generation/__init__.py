"""Between text and the engine: prompts to requests, tokens to text. What LLM and the server share."""
