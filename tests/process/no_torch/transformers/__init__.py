raise ImportError("transformers is not wanted here")
