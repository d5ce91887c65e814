"""The embedded engine: SGLang's HTTP API over a paged KV cache on the model code of transformers."""
