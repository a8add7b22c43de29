"""Images by Hugging Face's diffusers: one pipeline per worker, in its process."""
