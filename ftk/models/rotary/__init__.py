"""Decoders with rotary positions, as families share them: LLaMA, Mistral and Qwen differ by their options alone."""
