"""OpenAI's requests and answers: parameters, prompts, tokenising, bodies, log-probabilities.

What a file of prompts and the HTTP server have in common, so that both take the same and give the
same. No torch, no IO but reading the tokenizer.
"""
