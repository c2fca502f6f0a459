"""How fast is it here, and where does the time go? See `infllm bench`."""
