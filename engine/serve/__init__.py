"""The OpenAI-compatible HTTP server: one process, a client of the controller like any other.

`http` is its entry, `app` its routes. What a request may say and what it gets is `engine.api`'s;
here is what HTTP adds: limits on clients, places, streaming, metrics, KV caches to fetch. No torch.
"""
