"""The model on one device: config, layers, families, weights. No processes, no ranks, no sockets.

- `config` reads config.json into a `ModelConfig` (`architecture`); `families/` has one small file
  for each model type; neither imports torch.
- `attention` and `experts` are the two halves of the network; `layers`, `gqa`, `mla`, `spans`,
  `router`, `rope` and `kv` are their parts.
- `checkpoint` reads and audits safetensors files, `weights` says which stored tensor is which
  parameter, `loading` fills either half with its own tensors only.
- `sizes` estimates memory; `demo` makes a small checkpoint to try things with.

Anything in the engine may import it; it imports nothing of the engine but `engine.errors`.
"""
