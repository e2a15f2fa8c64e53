"""Hugging Face libraries with a loop of one's own: docs/hugging-face.md."""
