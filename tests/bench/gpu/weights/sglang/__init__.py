"""Models that SGLang takes instead of its own, with SGLANG_EXTERNAL_MODEL_PACKAGE: it looks at each module of this package."""
