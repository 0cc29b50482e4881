"""Hugging Face decoders: loading, our attention function, parallel plans."""
