"""Commands that simulate and measure."""
