"""The HTTP server: OpenAI's, Anthropic's and vLLM's routes over the clients of engines."""
